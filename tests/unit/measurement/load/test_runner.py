"""Runs on a virtual clock: every time is exact, so due, sent and arrived times have no noise."""

from __future__ import annotations

import asyncio
import math

import pytest

from capacity.clock import run as on_virtual_clock
from measurement.load.latencies import LatencyObjectives, figures, percentile
from measurement.load.runner import (
    Answered,
    Arrived,
    RequestOutcome,
    Run,
    closed_loop,
    constant,
    open_loop,
    poisson,
)
from slipstream.errors import InvalidArgument, Unavailable


class Server:
    """Serves one request at a time, `first_s` to the first token and `next_s` to each of the others."""

    def __init__(self, first_s: float, next_s: float, tokens: int, stall_at: int = -1, stall_s: float = 0.0) -> None:
        self.first_s, self.next_s, self.tokens = first_s, next_s, tokens
        self.stall_at, self.stall_s = stall_at, stall_s
        self.turn = asyncio.Lock()
        self.asked_s: list[float] = []

    async def __call__(self, index: int, arrived: Arrived) -> Answered:
        self.asked_s.append(asyncio.get_running_loop().time())
        async with self.turn:
            await asyncio.sleep(self.first_s + (self.stall_s if index == self.stall_at else 0.0))
            arrived()
            for _ in range(self.tokens - 1):
                await asyncio.sleep(self.next_s)
                arrived()
        return Answered(self.tokens, rounds=self.tokens)


def test_an_open_loop_does_not_wait_for_a_server_that_stalls() -> None:
    async def main() -> tuple[Run, list[float]]:
        server = Server(0.5, 0.0, 1, stall_at=2, stall_s=100.0)
        return await open_loop(server, 8, constant(1.0)), server.asked_s

    run, asked_s = on_virtual_clock(main())
    assert asked_s == [float(second) for second in range(8)]  # through the stall of 100 s
    # The requests behind the stall count their waiting: the server is free at 102.5 s, then serves one each 0.5 s.
    assert [outcome.ttft_s for outcome in run.outcomes] == pytest.approx(
        [0.5, 0.5, 100.5, 100.0, 99.5, 99.0, 98.5, 98.0]
    )
    assert figures(run)["ttft_p50_ms"] == pytest.approx(98_500.0)  # the 4th of 8


def test_a_closed_loop_waits_for_a_stalled_server_and_its_due_times_show_it() -> None:
    run = on_virtual_clock(_closed(Server(0.5, 0.0, 1, stall_at=2, stall_s=100.0)))
    assert [outcome.due_s for outcome in run.outcomes] == pytest.approx([0.0, 0.5, 1.0, 101.5])
    assert [outcome.ttft_s for outcome in run.outcomes] == pytest.approx([0.5, 0.5, 100.5, 0.5])
    assert run.wall_s == pytest.approx(102.0)


async def _closed(server: Server) -> Run:
    return await closed_loop(server, 4, 1)


def test_a_closed_loop_keeps_its_number_of_requests_under_way() -> None:
    under_way = [0]
    most = [0]

    async def send(index: int, arrived: Arrived) -> Answered:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(1.0 + index % 3)
        arrived()
        under_way[0] -= 1
        return Answered(1)

    run = on_virtual_clock(closed_loop(send, 20, 4))
    assert most == [4]
    assert [outcome.index for outcome in run.outcomes] == list(range(20))
    assert len(run.served) == 20


def test_lateness_of_the_client_itself_counts_and_is_reported() -> None:
    """A client whose loop is blocked sends late: the time is part of the latency, from the moment of the schedule."""

    async def main() -> Run:
        loop = asyncio.get_running_loop()

        async def send(index: int, arrived: Arrived) -> Answered:
            if index == 0:
                loop.now += 10.0  # type: ignore[attr-defined]  # the thread is busy; nothing else can run
            arrived()
            return Answered(1)

        return await open_loop(send, 4, constant(1.0))

    run = on_virtual_clock(main())
    assert [outcome.ttft_s for outcome in run.outcomes] == pytest.approx([10.0, 9.0, 8.0, 7.0])
    assert figures(run)["sent_late_max_ms"] == pytest.approx(9_000.0)


def test_poisson_arrivals_are_the_same_for_both_runs_of_a_pair_and_have_their_rate() -> None:
    times = poisson(5.0, seed=3)(20_000)
    assert times == poisson(5.0, seed=3)(20_000) != poisson(5.0, seed=4)(20_000)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0.0
    assert math.fsum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.03)
    # Exponential: the standard deviation is the mean, and exp(-1) of the gaps exceed it.
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_is_positive(rate: float) -> None:
    for made in (constant, poisson):
        with pytest.raises(InvalidArgument, match="positive"):
            made(rate)


def test_latencies_of_known_arrivals() -> None:
    outcome = RequestOutcome(0, due_s=1.0, sent_s=1.25, heard_s=[2.0, 2.5, 4.0], answered=Answered(7))
    assert (outcome.ttft_s, outcome.e2e_s, outcome.tpot_s, outcome.itl_s) == (1.0, 3.0, 2.0 / 6.0, [0.5, 1.5])
    silent = RequestOutcome(1, due_s=1.0)
    assert (silent.ttft_s, silent.e2e_s, silent.tpot_s, silent.itl_s) == (None, None, None, [])


def test_percentiles_are_by_nearest_rank() -> None:
    assert [percentile(list(range(1, 21)), share) for share in (0.0, 0.05, 0.5, 0.51, 0.95, 0.951, 1.0)] == [
        *(1, 1, 10, 11, 19, 20, 20)
    ]
    assert percentile([7.0], 0.99) == 7.0
    for size in range(1, 200):  # never one too high for a share that is no binary fraction
        for percent in range(1, 101):
            assert percentile(range(1, size + 1), percent / 100) == -(-percent * size // 100)


def test_goodput_counts_the_requests_that_meet_every_objective() -> None:
    outcomes = [
        RequestOutcome(0, 0.0, heard_s=[0.1, 0.3], answered=Answered(3)),  # TTFT 100, TPOT 100, E2E 300
        RequestOutcome(1, 0.0, heard_s=[0.2, 0.3], answered=Answered(2)),  # TTFT 200, TPOT 100
        RequestOutcome(2, 0.0, heard_s=[0.1, 0.5], answered=Answered(2)),  # TTFT 100, TPOT 400
        RequestOutcome(3, 0.0, heard_s=[0.1], answered=Answered(1)),  # one token: no TPOT
        RequestOutcome(4, 0.0, heard_s=[0.1, 0.2], error=Unavailable("gone")),
        RequestOutcome(5, 0.0),
    ]
    run = Run(outcomes, wall_s=2.0)
    both = figures(run, LatencyObjectives(ttft_ms=150.0, tpot_ms=150.0))
    assert (both["goodput_per_s"], both["good_share"], both["failed"]) == (1.0, 2 / 6, 1)
    assert figures(run, LatencyObjectives(tpot_ms=150.0))["goodput_per_s"] == 1.5
    assert figures(run, LatencyObjectives(e2e_ms=250.0))["goodput_per_s"] == 0.5
    assert "goodput_per_s" not in figures(run)


def test_a_request_that_fails_is_counted_and_its_times_are_not() -> None:
    async def send(index: int, arrived: Arrived) -> Answered:
        arrived()
        await asyncio.sleep(1.0)
        if index == 1:
            raise Unavailable("gone")
        arrived()
        return Answered(2, rounds=2, rounds_with_drafts=1, drafted=4, accepted=1)

    found = figures(on_virtual_clock(closed_loop(send, 4, 4)))
    assert (found["requests"], found["failed"], found["tokens"]) == (4, 1, 6)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (6.0, 3.0)
    assert (found["tpot_p50_ms"], found["itl_mean_ms"], found["e2e_p99_ms"]) == (1000.0, 1000.0, 1000.0)
    assert (found["acceptance_rate"], found["acceptance_length"], found["tokens_per_round"]) == (0.25, 2.0, 1.0)
