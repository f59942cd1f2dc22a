"""Matches, counts and followers of the suffix automaton against a search of the plain texts."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given

from slipstream.proposers import suffix_automaton
from slipstream.proposers.suffix_automaton import ROOT, Match, Matcher, SuffixAutomaton
from tests.support.random_texts import Text, built, ends, followers, longest, read, several, text


@given(several, text)
def test_a_match_its_count_and_its_followers_are_those_of_a_search(texts: list[Text], tokens: Text) -> None:
    automaton = built(texts)
    matcher = Matcher(automaton)
    for index, token in enumerate(tokens):
        matcher.advance(token)
        part = longest(texts, tokens[: index + 1])
        assert matcher.match.length == len(part)
        if part:
            assert automaton.count(matcher.match) == len(ends(texts, part))
            found = automaton.followers(matcher.match)
            assert dict(found) == followers(texts, part)
            assert [hits for _, hits in found] == sorted((hits for _, hits in found), reverse=True)


@given(several, text)
def test_the_tail_is_the_longest_suffix_that_occurred_earlier(texts: list[Text], tokens: Text) -> None:
    automaton = built([*texts, tokens])
    whole = [*texts, tokens]
    part = next(
        tokens[start:]
        for start in range(len(tokens) + 1)
        if len(ends(whole, tokens[start:])) > 1 or start == len(tokens)
    )
    assert automaton.tail().length == len(part)
    if part:
        assert dict(automaton.followers(automaton.tail())) == followers(whole, part)


@given(several, text)
def test_shorter_is_the_longest_suffix_with_more_occurrences(texts: list[Text], tokens: Text) -> None:
    automaton = built(texts)
    match = read(automaton, tokens).match
    part = longest(texts, tokens)
    while part:
        more = [part[i:] for i in range(1, len(part) + 1) if len(ends(texts, part[i:])) > len(ends(texts, part))]
        match, part = automaton.shorter(match), (more[0] if more else [])
        assert match.length == len(part)


@given(several)
def test_there_are_at_most_two_states_for_each_token(texts: list[Text]) -> None:
    automaton = built(texts)
    assert automaton.states <= 2 * len(automaton) + 1
    assert len(automaton) == sum(map(len, texts))


def test_a_text_seen_again_costs_no_state() -> None:
    tokens = [random.Random(1).randrange(9) for _ in range(200)]
    once, thrice = built([tokens]), built([tokens] * 3)
    assert once.states == thrice.states
    assert thrice.count(read(thrice, tokens).match) == 3


def test_a_loop_costs_bounded_work_for_each_token_and_counts_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_automaton, "COUNT_LIMIT", 10)
    tokens = [1] * 50 + [2, 1, 3, 1, 2] * 9
    automaton = built([tokens])
    for part in ([1], [1] * 5, [1] * 45, [1, 2], [3], [2, 1, 3]):
        assert automaton.count(read(automaton, part).match) == min(10, len(ends([tokens], part)))


def test_an_empty_automaton_matches_nothing() -> None:
    automaton = SuffixAutomaton()
    assert automaton.tail() == Match(ROOT, 0) == read(automaton, [1, 2]).match
    assert automaton.followers(automaton.tail()) == []


def test_memory_is_bounded_by_the_text_even_if_nothing_repeats() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(500) for _ in range(5_000)]
    tracemalloc.start()
    automaton = built([tokens])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(automaton) < 800
