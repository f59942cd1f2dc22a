"""The doctor's sentence about a short text with and without speculation."""

from __future__ import annotations

import pytest

from measurement.cli.diagnosis import _compare_texts
from slipstream.client.completion import Completion
from slipstream.v1 import gateway_pb2


def completion(drafted: int) -> Completion:
    statistics = gateway_pb2.Statistics(rounds=2, drafted=drafted)
    return Completion(gateway_pb2.Started(model="target"), gateway_pb2.Finished(statistics=statistics))


@pytest.mark.parametrize(("drafted", "paused", "well"), [(0, False, False), (0, True, True), (3, False, True)])
def test_no_candidate_is_a_fault_where_drafting_does_not_pause(drafted: int, paused: bool, well: bool) -> None:
    found = list(_compare_texts("gateway:50051", completion(0), completion(drafted), paused))

    assert all(each.ok for each in found) == well
    assert any("drafting pauses" in each.text for each in found) == (paused and not drafted)
