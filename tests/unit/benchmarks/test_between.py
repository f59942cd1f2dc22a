"""What a step does besides its pass is counted, so that it does not grow unseen."""

from __future__ import annotations

import pytest

from benchmarks import tracing
from benchmarks.between import calls


@pytest.mark.parametrize(("nodes", "most"), [(0, 200), (8, 560)])
async def test_python_calls_between_two_passes_are_bounded(nodes: int, most: int) -> None:
    """Of each of 32 sessions, those included that are made while the next pass runs."""
    assert await calls(32, nodes) / 32 <= most


async def test_untraced_sessions_are_checked_for_tracing_three_times_a_step_at_most() -> None:
    assert await tracing.questions() <= 3 * tracing.SESSIONS
