"""What finished sessions leave behind: bounded, the latest first, and apart for each tenant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidArgument
from slipstream.proposers import corpus as corpus_module
from slipstream.proposers.corpus import Corpora, Corpus, CorpusReader
from slipstream.proposers.suffix import TreeBounds, likeliest_tree
from slipstream.proposers.suffix_automaton import Matcher
from tests.support.random_texts import Text, read, text


def matchers(corpus: Corpus, tokens: Text) -> list[Matcher]:
    return CorpusReader(corpus).matchers(tokens)


@given(st.integers(2, 30), st.lists(text, max_size=12))
def test_a_corpus_holds_the_latest_texts_within_its_bound(max_tokens: int, texts: list[Text]) -> None:
    corpus = Corpus(max_tokens)
    for tokens in texts:
        corpus.add(tokens)
        assert len(corpus) <= max_tokens
        if tokens:
            kept = tokens[-(max_tokens // 2) :][-32:]
            assert max(matcher.match.length for matcher in matchers(corpus, kept)) >= len(kept)


@given(st.integers(4, 60), st.integers(1, 5), st.lists(st.tuples(text, text), max_size=12))
def test_a_reader_finds_what_one_that_begins_anew_finds(
    max_tokens: int, reach: int, pieces: list[tuple[Text, Text]]
) -> None:
    """Whatever others add, and whatever is done with its matchers meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus_module, "REACH", reach)
        corpus, tokens = Corpus(max_tokens), [0]
        reader = CorpusReader(corpus)
        for other, own in pieces:
            corpus.add(other)
            for piece in (own, [], own[:1]):
                tokens += piece
                found = reader.matchers(tokens)
                for matcher in found:
                    anew = read(matcher.automaton, tokens[-reach:])
                    assert matcher.match.length == anew.match.length
                    assert matcher.automaton.followers(matcher.match) == matcher.automaton.followers(anew.match)
                    matcher.advance(1)


def test_a_dropped_generation_is_forgotten() -> None:
    corpus = Corpus(8)
    corpus.add([1, 2, 3])
    corpus.add([4, 5, 6])
    assert any(matcher.match.length for matcher in matchers(corpus, [1, 2, 3]))
    corpus.add([7, 8, 9])
    assert not any(matcher.match.length for matcher in matchers(corpus, [1, 2, 3]))


def test_matches_do_not_cross_the_boundary_of_two_texts_of_a_corpus() -> None:
    corpus = Corpus(100)
    corpus.add([1, 2])
    corpus.add([3, 4])
    assert likeliest_tree(matchers(corpus, [1, 2]), 4, TreeBounds(2, 0.0)) == []


def of(corpora: Corpora, salt: str, tenant: str = "") -> Corpus:
    corpus = corpora.find_corpus(salt, tenant)
    assert corpus is not None
    return corpus


def test_tenants_are_apart_unless_sharing_is_asked_for() -> None:
    corpora = Corpora(100)
    of(corpora, "red").add([1, 2, 3])
    assert likeliest_tree(matchers(of(corpora, "red"), [1, 2]), 4, TreeBounds(2, 0.0))
    assert likeliest_tree(matchers(of(corpora, "blue"), [1, 2]), 4, TreeBounds(2, 0.0)) == []
    shared = Corpora(100, shared=True)
    of(shared, "red").add([1, 2, 3])
    assert likeliest_tree(matchers(of(shared, ""), [1, 2]), 4, TreeBounds(2, 0.0))


def test_sessions_without_a_salt_share_nothing_unless_all_do() -> None:
    assert Corpora(100).find_corpus("") is None
    assert Corpora(100, shared=True).find_corpus("") is not None


def test_the_tenant_that_was_away_longest_is_dropped() -> None:
    corpora = Corpora(100, max_tenants=2)
    red, blue = corpora.find_corpus("red"), corpora.find_corpus("blue")
    assert corpora.find_corpus("red") is red
    corpora.find_corpus("green")
    assert corpora.find_corpus("red") is red
    assert corpora.find_corpus("blue") is not blue


def test_a_tenant_with_many_salts_drops_its_own_corpora() -> None:
    corpora = Corpora(100, max_tenants=4)
    kept = [of(corpora, salt, "me") for salt in ("one", "two")]
    for number in range(20):
        corpora.find_corpus(f"another {number}", "another")
    assert [of(corpora, salt, "me") for salt in ("one", "two")] == kept


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        Corpus(1)
    with pytest.raises(InvalidArgument):
        Corpora(10, max_tenants=0)
