"""Trees of guesses: blended as a naive model blends, best first, within their bounds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.proposers.lookup import FoundNode, confidence
from slipstream.proposers.suffix import TreeBounds, continuations, likeliest_tree
from slipstream.proposers.suffix_automaton import Matcher
from tests.support.random_texts import Text, built, ends, followers, longest, read, several, text

TWO = TreeBounds(2, 0.0)


def naive_continuations(
    collections: Sequence[Sequence[Text]], parts: Sequence[Text], width: int, enough: float
) -> list[tuple[int, float]]:
    """Every context of every collection, the longest first; each leaves the shorter ones what it did not spend."""
    contexts = []
    for number, (texts, part) in enumerate(zip(collections, parts, strict=True)):
        counts = [len(ends(texts, part[start:])) for start in range(len(part))]
        new = [start for start, count in enumerate(counts) if start == 0 or count > counts[start - 1]]
        contexts += [(-len(part) + start, number, followers(texts, part[start:])) for start in new]
    shares: dict[int, float] = {}
    left = 1.0
    for size, _, found in sorted(contexts, key=lambda context: context[:2]):
        wanted = {token: left * confidence(hits, found.total(), -size) for token, hits in found.most_common()}
        fresh = [token for token, share in wanted.items() if token not in shares and share >= enough]
        for token in fresh[: width - len(shares)]:
            shares[token] = wanted[token]
            left -= wanted[token]
    return list(shares.items())


@given(st.lists(several, max_size=3), text, st.integers(1, 3), st.floats(0, 0.3))
def test_continuations_blend_contexts_as_the_naive_model_does(
    collections: list[list[Text]], tokens: Text, width: int, enough: float
) -> None:
    automata = [built(texts) for texts in collections]
    matches = [read(automaton, tokens).match for automaton in automata]
    parts = [longest(texts, tokens) for texts in collections]
    shares = continuations(automata, matches, width, enough)
    wanted = naive_continuations(collections, parts, width, enough)
    assert [share for _, share in shares] == pytest.approx([share for _, share in wanted])
    assert sum(share for _, share in shares) < 1
    if width == 3:  # the order among equals is free, and shows only where not all three tokens fit
        assert dict(shares) == pytest.approx(dict(wanted))


@given(several, text, st.integers(0, 12), st.integers(1, 3), st.floats(0, 0.5))
def test_a_tree_keeps_its_bounds_and_grows_best_first(
    texts: list[Text], tokens: Text, nodes: int, width: int, least: float
) -> None:
    automaton = built(texts)
    matcher = read(automaton, tokens)
    before = matcher.match
    grown = likeliest_tree([matcher], nodes, TreeBounds(width, least))
    assert matcher.match == before
    assert len(grown) <= nodes
    path = [1.0]
    for index, node in enumerate(grown):
        assert 0 <= node.parent <= index
        path.append(path[node.parent] * node.probability)
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(path))
    assert all(probability >= least * (1 - 1e-9) for probability in path[1:])
    children = Counter(node.parent for node in grown)
    assert all(number <= width for number in children.values())
    assert len({(node.parent, node.token) for node in grown}) == len(grown)


@given(several, text, st.integers(1, 3), st.floats(0.01, 0.3))
def test_a_tree_is_every_path_that_is_probable_enough(
    texts: list[Text], tokens: Text, width: int, least: float
) -> None:
    automaton = built(texts)
    wanted: set[tuple[int, ...]] = set()

    def descend(matcher: Matcher, path: tuple[int, ...], probability: float) -> None:
        for token, share in continuations([automaton], [matcher.match], width, least / probability):
            below = Matcher(automaton, matcher.match)
            below.advance(token)
            if len(path) < 3:
                wanted.add((*path, token))
                descend(below, (*path, token), probability * share)

    matcher = read(automaton, tokens)
    descend(matcher, (), 1.0)
    paths: list[tuple[int, ...]] = [()]
    for node in likeliest_tree([matcher], 200, TreeBounds(width, least)):
        paths.append((*paths[node.parent], node.token))
    if len(paths) <= 200:
        assert {path for path in paths[1:] if len(path) <= 3} == wanted


def test_a_certain_continuation_grows_a_chain_and_an_uncertain_one_a_bush() -> None:
    sure = built([[1, 2, 3, 4, 5, 6]] * 8)
    assert [node.parent for node in likeliest_tree([read(sure, [1, 2])], 4, TreeBounds(3, 0.2))] == [0, 1, 2, 3]
    unsure = built([[1, 2, last] for last in (3, 4, 5)] * 8)
    assert [node.parent for node in likeliest_tree([read(unsure, [1, 2])], 4, TreeBounds(3, 0.1))] == [0, 0, 0]


def test_of_several_matchers_the_longest_match_proposes_first_and_of_equals_the_first() -> None:
    own, other = built([[1, 2, 9]]), built([[0, 1, 2, 3]])
    assert [node.token for node in likeliest_tree([read(own, [1, 2]), read(other, [0, 1, 2])], 1, TWO)] == [3]
    assert [node.token for node in likeliest_tree([read(own, [1, 2]), read(other, [1, 2])], 1, TWO)] == [9]
    both = likeliest_tree([read(own, [1, 2]), read(other, [1, 2])], 2, TWO)
    assert both[1] == FoundNode(0, 3, (1 - confidence(1, 1, 2)) * confidence(1, 1, 2))
    assert likeliest_tree([], 4, TWO) == likeliest_tree([Matcher(own)], 4, TWO) == []


def test_nodes_are_named_as_on_the_wire() -> None:
    grown = likeliest_tree([read(built([[1, 2, 3]]), [1])], 2, TWO)
    assert [(node.parent, node.token) for node in grown] == [(0, 2), (1, 3)]
    assert isinstance(grown[0], FoundNode)
    assert math.isclose(grown[0].probability, confidence(1, 1, 1))
