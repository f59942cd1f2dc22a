"""Small random texts, and what a plain search finds in them: the model that suffix lookups are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st

from slipstream.proposers.suffix_automaton import Matcher, SuffixAutomaton

Text = list[int]
text = st.lists(st.integers(0, 2), max_size=24)
several = st.lists(text, max_size=4)


def built(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for tokens in texts:
        automaton.begin()
        automaton.extend(tokens)
    return automaton


def ends(texts: Sequence[Sequence[int]], part: Sequence[int]) -> list[tuple[int, int]]:
    """(text, index after) of every occurrence of `part`."""
    size = len(part)
    return [
        (number, end)
        for number, tokens in enumerate(texts)
        for end in range(size, len(tokens) + 1)
        if list(tokens[end - size : end]) == list(part)
    ]


def followers(texts: Sequence[Sequence[int]], part: Sequence[int]) -> Counter[int]:
    return Counter(texts[number][end] for number, end in ends(texts, part) if end < len(texts[number]))


def longest(texts: Sequence[Sequence[int]], read: Sequence[int]) -> list[int]:
    return next(list(read[start:]) for start in range(len(read) + 1) if start == len(read) or ends(texts, read[start:]))


def read(automaton: SuffixAutomaton, tokens: Sequence[int]) -> Matcher:
    matcher = Matcher(automaton)
    for token in tokens:
        matcher.advance(token)
    return matcher
