"""Which rounds stand out: a pure function of what a verifier saw, so the same rounds give the same spans."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipstream.telemetry.segments import (
    LEAST_SLOW_S,
    MOST_SLOW,
    REASONS,
    SEGMENT_TOKENS,
    SLOW_S,
    RoundChooser,
    SlowRounds,
)

Round = tuple[int, float, int, bool]
"""Committed tokens, seconds, cause of the miss, whether all was rolled back."""
ROUNDS = st.lists(
    st.tuples(st.integers(1, 9), st.floats(0.001, 2.0), st.integers(0, 4), st.booleans()), min_size=1, max_size=300
)


def chosen(rounds: list[Round], segment_tokens: int = SEGMENT_TOKENS, prompt: int = 10) -> list[str]:
    chooser, length, reasons = RoundChooser(segment_tokens), prompt, []
    for tokens, seconds, miss, rejected in rounds:
        reasons.append(REASONS.get(chooser.choose(length, seconds, miss, rejected=rejected), ""))
        length += tokens
    return reasons


def test_the_first_round_and_the_first_of_each_kind_in_a_segment_stand_out() -> None:
    steady: Round = (8, 0.03, 0, False)
    missed, exhausted, rejected, slow = (8, 0.03, 3, False), (8, 0.03, 4, False), (8, 0.03, 0, True), (8, 0.4, 0, False)
    rounds = [missed, steady, missed, missed, exhausted, rejected, rejected, steady, slow, steady]
    assert chosen(rounds) == ["first", "", "missed", "", "missed", "rejected", "", "", "slow", ""]
    later = chosen([steady] * 40 + rounds)[40:]  # another segment, which begins anew
    assert later == ["missed", "", "", "", "missed", "rejected", "", "", "slow", ""]


def test_slow_is_what_takes_three_times_the_mean_or_a_second() -> None:
    def judged(*seconds: float) -> list[bool]:
        slow = SlowRounds()
        return [slow.judge(each) for each in seconds]

    assert judged(0.01, 0.01, 0.031, 0.01) == [False, False, True, False]
    assert judged(0.001, 0.001, LEAST_SLOW_S - 0.001) == [False, False, False], "too short to matter"
    assert judged(SLOW_S, 0.9 * SLOW_S, SLOW_S) == [True, False, True], "slow from the beginning"


@given(ROUNDS)
def test_however_bad_a_session_is_few_of_its_rounds_have_spans(rounds: list[Round]) -> None:
    reasons = chosen(rounds)
    assert reasons == chosen(rounds)
    assert reasons[0] == "first" and reasons.count("first") == 1
    length, counts = 10, Counter[tuple[int, str]]()
    for (tokens, *_), reason in zip(rounds, reasons, strict=True):
        counts[length // SEGMENT_TOKENS, reason] += 1
        length += tokens
    most = {"slow": MOST_SLOW, "missed": 4, "rejected": 1, "first": 1}
    assert all(count <= most[reason] for (_, reason), count in counts.items() if reason)
    assert set(chosen(rounds, 0)) == {"asked"}


def test_a_request_of_500_rounds_has_few_spans() -> None:
    draw = random.Random(5)
    rounds = [
        (draw.choice((1, 2, 3, 5)), draw.uniform(0.03, 0.05), draw.choice((0, 0, 0, 3)), draw.random() < 0.2)
        for _ in range(500)
    ]
    alone = sum(map(bool, chosen(rounds)))
    segments = sum(tokens for tokens, *_ in rounds) // SEGMENT_TOKENS + 1
    assert 3 * segments + 5 * alone < 150, "2,500 where every round has its own"
