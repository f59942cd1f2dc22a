"""Statistics of a session: sums of the rounds, and times that never run backwards."""

from __future__ import annotations

import pytest

from gateway.sessions.request_stats import RequestStats
from slipstream.v1 import verifier_pb2


def test_statistics_are_sums_and_times_since_the_arrival() -> None:
    now = [10.0]
    stats = RequestStats(clock=lambda: now[0], arrived_at=9.0)
    stats.add_round(verifier_pb2.Round(drafted=0, wait_us=5))  # a prefill that is not done yet
    now[0] = 12.0
    stats.add_round(verifier_pb2.Round(token_ids=[1], drafted=0, verify_us=1_000_000))
    now[0] = 13.0
    stats.add_round(verifier_pb2.Round(token_ids=[1, 2, 3], drafted=4, accepted=2, wait_us=15, verify_us=500_000))
    now[0] = 14.0
    stats.close()
    now[0] = 99.0
    told = stats.statistics()
    assert (told.rounds, told.rounds_with_drafts, told.drafted, told.accepted) == (3, 1, 4, 2)
    assert (told.ttft_s, told.e2e_s, told.emitted) == (3.0, 5.0, 4)
    assert (told.wait_s, told.verify_s) == pytest.approx((20e-6, 1.5))


def test_without_a_token_the_first_is_as_late_as_the_end() -> None:
    stats = RequestStats(clock=lambda: 11.0, arrived_at=9.0)
    told = stats.statistics()
    assert told.ttft_s == told.e2e_s == 2.0


def test_misses_are_counted_by_cause_and_every_other_round_is_a_hit() -> None:
    stats = RequestStats(clock=lambda: 0.0, arrived_at=0.0)
    causes = [1, 2, 3, 3, 4, 0, 0, 99]  # the last one of a newer contract
    for cause in causes:
        stats.add_round(verifier_pb2.Round.FromString(b"\x48" + bytes([cause])))
    told = stats.statistics()
    assert told.hits == 2
    assert dict(told.misses) == {"no_drafter": 1, "opening": 1, "diverged": 2, "exhausted": 1, "other": 1}
    assert told.hits + sum(told.misses.values()) == told.rounds


def test_without_speculation_there_are_neither_hits_nor_misses() -> None:
    stats = RequestStats(clock=lambda: 0.0, arrived_at=0.0, max_draft_tokens=0)
    stats.add_round(verifier_pb2.Round(token_ids=[1]))
    assert (stats.statistics().hits, dict(stats.statistics().misses)) == (0, {})


def test_drafters_have_their_own_sums_and_predictions_are_those_of_predicting_ones() -> None:
    stats = RequestStats(clock=lambda: 0.0, arrived_at=0.0, predicts=lambda name: name.startswith("known"))
    share = verifier_pb2.DrafterShare
    shares = [
        [share(drafter="model", drafted=4, accepted=1), share(drafter="known-text", drafted=5, accepted=5)],
        [share(drafter="known-text", drafted=3, accepted=1)],
        [],
    ]
    for one in shares:
        stats.add_round(verifier_pb2.Round(drafters=one, bubble_us=250_000))
    told = stats.statistics()
    assert [(one.name, one.drafted, one.accepted) for one in told.drafters] == [("known-text", 8, 6), ("model", 4, 1)]
    assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == (6, 2)
    assert told.bubble_s == 0.75
