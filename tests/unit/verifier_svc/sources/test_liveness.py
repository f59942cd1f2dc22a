"""Who is silent, and who was only not heard because this process itself stood still; on a virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest

from capacity.clock import VirtualLoop, run
from slipstream.concurrency import CHECKS
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2, worker_pb2
from tests.support.verifier_sessions import Sent
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.drafter_link import DrafterLink
from verifier_svc.sources.liveness import LivenessMonitor

PATIENCE_S = 6.0
PAUSE_S = PATIENCE_S / CHECKS


def stand_still(seconds: float) -> None:
    """As under SIGSTOP: time passes, and nothing of this process runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


class Worker:
    """A drafter's WorkerService."""

    def __init__(self) -> None:
        self.steps: int | None = 0
        """None while it answers nothing."""
        self.stall_s = 0.0
        """For so long this process stands still when it asks next; no answer is in time then."""

    async def GetModel(self, request: worker_pb2.GetModelRequest, timeout: float) -> worker_pb2.GetModelResponse:
        await self.answering(timeout)
        return worker_pb2.GetModelResponse()

    def Watch(self, request: worker_pb2.WatchRequest, timeout: float) -> Watch:
        return Watch(self, timeout)

    async def answering(self, timeout: float) -> None:
        stalled, self.stall_s = self.stall_s, 0.0
        stand_still(stalled)
        if self.steps is None or stalled:
            await asyncio.sleep(max(0.0, timeout - stalled))
            raise grpc.RpcError


class Watch:
    def __init__(self, worker: Worker, timeout: float) -> None:
        self._worker, self._timeout = worker, timeout

    async def read(self) -> worker_pb2.WatchResponse:
        await self._worker.answering(self._timeout)
        return worker_pb2.WatchResponse(steps=self._worker.steps or 0)

    def cancel(self) -> None:
        pass


class Owing:
    """A drafter that has owed a step since 0 s, under a vigil; `silent_at` says when it was given up."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.worker, self.silent_at = Worker(), list[float]()
        self.vigil = LivenessMonitor(PATIENCE_S, self.clock, grpc.aio.insecure_channel("unix:nobody"))
        self.vigil._worker = self.worker  # type: ignore[assignment]
        self.task = asyncio.create_task(self.vigil.run(lambda: None, self._owed, self._silent))

    def _owed(self) -> float:
        return 0.0 if self.vigil.progress_at < 0.0 else math.inf

    def _silent(self) -> None:
        self.silent_at.append(self.clock())


Main = Callable[[Owing], Coroutine[Any, Any, None]]


def watched(main: Main) -> None:
    async def whole() -> None:
        owing = Owing()
        await main(owing)
        owing.task.cancel()

    run(whole())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_drafter_without_a_sign_of_life_within_the_patience_is_silent_and_one_with_it_is_not(hangs: bool) -> None:
    async def main(owing: Owing) -> None:
        owing.worker.steps = None if hangs else 1
        await asyncio.sleep(3 * PATIENCE_S)
        assert len(owing.silent_at) == hangs
        assert all(PATIENCE_S <= at <= PATIENCE_S + 3 * PAUSE_S for at in owing.silent_at)

    watched(main)


@pytest.mark.parametrize("before_s", [0.1, 0.5, 2.1, 4.5])
@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_the_silence_limit_restarts_after_this_process_was_suspended(
    before_s: float, asking: bool, hangs: bool
) -> None:
    """The drafter steps two seconds after the stall, if it does: within anybody's patience but that of a clock."""
    stalled_s = 10 * PATIENCE_S

    async def main(owing: Owing) -> None:
        owing.worker.steps = None
        await asyncio.sleep(before_s)
        if asking:
            owing.worker.stall_s = stalled_s
            await asyncio.sleep(2 * PAUSE_S)
        else:
            stand_still(stalled_s)
        await asyncio.sleep(2 * PAUSE_S)
        assert owing.silent_at == []
        owing.worker.steps = None if hangs else 1
        await asyncio.sleep(2 * PATIENCE_S)
        assert len(owing.silent_at) == hangs

    watched(main)


def attached_to_nobody() -> tuple[DrafterLink, list[str]]:
    """A drafter whose link is down, and what the gateway of its session is told."""
    pool = CandidateSources(types_pb2.ModelInfo(), 0.0, asyncio.get_running_loop().time, silence_s=PATIENCE_S)
    drafter, told = pool._link("nobody:1", []), list[str]()
    request = SessionRequest(
        id="s",
        number=1,
        epoch=1,
        sampling=SamplingParams(),
        prompt_length=2,
        max_length=9,
        stop_token_ids=frozenset(),
        max_draft_tokens=8,
        stream=Sent(lambda reply: told.append(reply.failure.reason)),
    )
    session = Session(
        request,
        tokens=[1, 2],
        credit=None,
        tree=CandidateTree([1, 2]),
        history=TokenHistory([1, 2]),
    )
    drafter.open(session, "model")
    return drafter, told


def test_a_link_that_could_not_connect_while_this_process_was_suspended_is_not_yet_lost() -> None:
    async def main() -> None:
        drafter, told = attached_to_nobody()
        vigil = asyncio.create_task(
            drafter._liveness.run(drafter._report_unreached, drafter._owed_since, drafter._detach_silent)
        )
        await asyncio.sleep(0.5)
        stand_still(10 * PATIENCE_S)
        await asyncio.sleep(PATIENCE_S - PAUSE_S)
        assert told == []
        await asyncio.sleep(3 * PAUSE_S)
        assert told == ["LINK_LOST"]
        vigil.cancel()

    run(main())
