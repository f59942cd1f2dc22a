"""The ledger: sums of the rounds, and times that never run backwards."""

from __future__ import annotations

import pytest

from gateway.rounds import Ledger
from slipstream.v1 import verifier_pb2


def test_statistics_are_sums_and_times_since_the_arrival() -> None:
    now = [10.0]
    ledger = Ledger(clock=lambda: now[0], arrived_at=9.0)
    ledger.add(verifier_pb2.Round(drafted=0, wait_us=5))  # a prefill that is not done yet
    now[0] = 12.0
    ledger.add(verifier_pb2.Round(token_ids=[1], drafted=0, verify_us=1_000_000))
    now[0] = 13.0
    ledger.add(verifier_pb2.Round(token_ids=[1, 2, 3], drafted=4, accepted=2, wait_us=15, verify_us=500_000))
    now[0] = 14.0
    ledger.close()
    now[0] = 99.0
    told = ledger.statistics()
    assert (told.rounds, told.rounds_with_drafts, told.drafted, told.accepted) == (3, 1, 4, 2)
    assert (told.ttft_s, told.e2e_s) == (3.0, 5.0)
    assert (told.wait_s, told.verify_s) == pytest.approx((20e-6, 1.5))


def test_without_a_token_the_first_is_as_late_as_the_end() -> None:
    ledger = Ledger(clock=lambda: 11.0, arrived_at=9.0)
    told = ledger.statistics()
    assert told.ttft_s == told.e2e_s == 2.0
