"""Distinguishes a drafter that hangs from one that has no candidates to send, whatever its method.

Silence alone proves nothing: an index without a match sends nothing for minutes, a full tree asks for nothing, a long
prompt takes its time. But whatever the method, an Open, and a Commit that left the drafter's tree, make a live drafter
take at least one *step* or send a frame, because nothing that it sent hangs below the new root. So a step is owed from
such a command on, and there are two signs of life: a frame, and growth of the step counter that the drafter's
WorkerService reports, which is read only when frames stay away. A drafter without either for `silence_s` is silent:
stopped, deadlocked, in an endless loop. One that steps but never proposes is not: it costs nothing. Both signs count
for the whole link, because a busy drafter may well keep one session waiting. Where this process itself stood still, the
time begins anew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import NoReturn

import grpc

from slipstream.concurrency import StallWatch
from slipstream.errors import SlipstreamError
from slipstream.rpc.channel import parsed
from slipstream.v1 import worker_pb2, worker_pb2_grpc

UNLIMITED = 2**62


class LivenessMonitor(StallWatch):
    """Watches one drafter. `run` calls `tick` at every check, and `silent` when the drafter gave no sign of life."""

    def __init__(self, silence_s: float, clock: Callable[[], float], channel: grpc.aio.Channel) -> None:
        super().__init__(silence_s, clock, progress_at=-math.inf)
        self.max_length = UNLIMITED
        """Tokens of the drafter's longest session, once it reported them: for a longer one it rightly takes no step."""
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._steps: int | None = None

    def restarted(self) -> None:
        """Another process may be at the other end."""
        self.note_progress()
        self._steps = None
        self.max_length = UNLIMITED

    async def run(self, tick: Callable[[], None], owed: Callable[[], float], silent: Callable[[], None]) -> NoReturn:
        """`owed` returns the monotonic seconds since which a step is owed; infinity when none is."""
        while True:
            await self._noting_pauses(asyncio.sleep(self.check_s), 2 * self.check_s)
            tick()
            if self._clock() - owed() < self.check_s:
                continue
            await self._noting_pauses(self._read_steps(self.check_s), 3 * self.check_s)
            if self.stalled(owed()):
                self.note_progress()  # sessions attached from now on begin anew
                silent()

    async def _noting_pauses(self, work: Awaitable[None], longest_s: float) -> None:
        began = self._clock()
        await work
        self.note_check(began, longest_s)

    async def _read_steps(self, timeout_s: float) -> None:
        """Records a sign of life if the drafter's step counter grew."""
        try:
            if self._steps is None:
                answer = parsed(await self._worker.GetModel(worker_pb2.GetModelRequest(), timeout=timeout_s))
                self.max_length = answer.model.max_length or UNLIMITED
            call = self._worker.Watch(worker_pb2.WatchRequest(), timeout=timeout_s)
            try:
                load = parsed(await call.read())
            finally:
                call.cancel()
        except (grpc.RpcError, SlipstreamError):  # no answer in time, or none of a worker: only frames count then
            return
        if load is not grpc.aio.EOF and load.steps != self._steps:
            self._steps = load.steps
            self.note_progress()
