"""Prompt lookup against a model that searches the whole text anew for every question."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidArgument, OutOfRange
from slipstream.proposers.lookup import confidence
from slipstream.proposers.ngram import NgramIndex

texts = st.lists(st.integers(0, 2), max_size=40)
paths = st.lists(st.integers(0, 2), max_size=6)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


def followed(text: Sequence[int], gram: Sequence[int]) -> list[int]:
    """Indices of the tokens that follow an occurrence of the gram."""
    size = len(gram)
    return [end for end in range(size, len(text)) if list(text[end - size : end]) == list(gram)]


class Naive:
    def __init__(self, text: Sequence[int], longest: int, shortest: int) -> None:
        self.text, self.longest, self.shortest = list(text), longest, shortest

    def match(self, beyond: list[int]) -> tuple[int, list[int]]:
        whole = self.text + beyond
        for size in range(min(self.longest, len(whole)), self.shortest - 1, -1):
            found = followed(self.text, whole[-size:])
            if found:
                return size, found
        return 0, []

    def propose(self, path: list[int], count: int) -> list[tuple[int, float]]:
        beyond = list(path)
        _, found = self.match(beyond)
        chain: list[tuple[int, float]] = []
        for source in range(found[-1], found[-1] + count) if found else ():
            token = (self.text + beyond)[source]
            size, ends = self.match(beyond)
            hits = sum(self.text[end] == token for end in ends)
            if not hits:
                break
            chain.append((token, confidence(hits, len(ends), size)))
            beyond.append(token)
        return chain


def built(text: Sequence[int], longest: int = 4, shortest: int = 2) -> NgramIndex:
    index = NgramIndex(longest, shortest)
    index.append(text)
    return index


@given(texts, paths, sizes, st.integers(0, 8))
def test_a_proposal_is_what_a_search_of_the_whole_text_finds(
    text: list[int], path: list[int], size: list[int], count: int
) -> None:
    shortest, longest = size
    assert built(text, longest, shortest).propose(path, count) == Naive(text, longest, shortest).propose(path, count)


@given(st.lists(st.tuples(texts, st.floats(0, 1)), max_size=5), paths, sizes)
def test_truncation_leaves_nothing_behind(
    edits: list[tuple[list[int], float]], path: list[int], size: list[int]
) -> None:
    shortest, longest = size
    index, text = NgramIndex(longest, shortest), []
    for more, kept in edits:
        index.append(more)
        text += more
        del text[int(len(text) * kept) :]
        index.truncate(len(text))
        assert index.propose(path, 6) == Naive(text, longest, shortest).propose(path, 6)
    same = built(text, longest, shortest)
    assert vars(index) == vars(same)
    assert len(index) == len(text)


@given(texts, paths, sizes)
def test_a_path_is_ever_less_probable_and_what_may_follow_it_sums_to_less_than_one(
    text: list[int], path: list[int], size: list[int]
) -> None:
    shortest, longest = size
    shares = [probability for _, probability in built(text, longest, shortest).propose(path, 8)]
    products = list(itertools.accumulate(shares, lambda a, b: a * b))
    assert all(0 < share < 1 for share in shares)
    assert all(b < a for a, b in itertools.pairwise(products))


def test_the_longest_ngram_wins_and_of_its_occurrences_the_latest() -> None:
    text = [1, 2, 3, 7, 2, 3, 8, 1, 2, 3]
    assert [token for token, _ in built(text).propose([], 2)] == [7, 2]
    assert [token for token, _ in built(text[3:]).propose([], 1)] == [8]
    assert built([1, 2, 3, 4, 5]).propose([], 4) == []


def test_a_loop_goes_on_beyond_the_end() -> None:
    assert [token for token, _ in built([5, 6, 5, 6, 5, 6]).propose([], 5)] == [5, 6, 5, 6, 5]


def test_a_guessed_path_is_looked_up_but_is_no_evidence() -> None:
    index = built([1, 2, 3, 4, 9, 9])
    assert [token for token, _ in index.propose([1, 2], 2)] == [3, 4]
    assert index.propose([7, 8, 7, 8], 2) == []
    assert len(index) == 6


def test_frequent_continuations_and_long_matches_are_believed_more() -> None:
    assert confidence(1, 1, 4) < confidence(3, 3, 4) < 1
    assert confidence(1, 2, 4) < confidence(1, 1, 4)
    assert confidence(1, 1, 1) < confidence(1, 1, 2) < confidence(1, 1, 32)


@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_outside_the_text_is_refused(length: int) -> None:
    with pytest.raises(OutOfRange):
        built([1, 2, 3]).truncate(length)


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (4, 0)])
def test_impossible_sizes_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(InvalidArgument):
        NgramIndex(longest, shortest)


def test_memory_is_bounded_by_the_text_even_if_nothing_repeats() -> None:
    rng = random.Random(0)
    text = [rng.randrange(150_000) for _ in range(4_000)]
    tracemalloc.start()
    index = built(text)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(index) < 1200
    index.truncate(0)
    assert math.isclose(len(index), 0)
    assert not index.propose([text[0], text[1]], 4)
