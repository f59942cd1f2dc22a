"""Tells a drafter that hangs from one that has nothing to say, without knowing how it guesses.

Silence proves nothing: an index without a match says nothing for minutes, a full tree asks for nothing, a long prompt
takes its time. But whatever the method, an Open, and a Commit that left the drafter's tree, make a live drafter take at
least one *step* or frame, because nothing that was told hangs below the new root. So a step is owed from such a command
on, and there are two signs of life: a frame, and growth of the step counter that the drafter's WorkerService tells,
which is asked for only when frames stay away. A drafter without either for `patience_s` is silent: stopped, deadlocked,
in an endless loop. One that steps but never guesses is not: it costs nothing. Both count for the whole link, for a busy
drafter may well keep one session waiting. Where this process itself stood still, the patience begins anew.
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
    """Over one drafter. `run` calls `tick` at every look, and `silent` when the drafter gave no sign of life."""

    def __init__(self, patience_s: float, clock: Callable[[], float], channel: grpc.aio.Channel) -> None:
        super().__init__(patience_s, clock, progress_at=-math.inf)
        self.max_length = UNLIMITED
        """Tokens of the drafter's longest session, once it said so: for a longer one it rightly takes no step."""
        self._worker = worker_pb2_grpc.WorkerServiceStub(channel)
        self._steps: int | None = None

    def restarted(self) -> None:
        """Another process may be at the other end."""
        self.note_progress()
        self._steps = None
        self.max_length = UNLIMITED

    async def run(self, tick: Callable[[], None], owed: Callable[[], float], silent: Callable[[], None]) -> NoReturn:
        """`owed` says since when a step is owed; infinity when none is."""
        while True:
            await self._noting_pauses(asyncio.sleep(self.look_s), 2 * self.look_s)
            tick()
            if self._clock() - owed() < self.look_s:
                continue
            await self._noting_pauses(self._ask(self.look_s), 3 * self.look_s)
            if self.stalled(owed()):
                self.note_progress()  # whoever is attached from now on begins anew
                silent()

    async def _noting_pauses(self, work: Awaitable[None], longest_s: float) -> None:
        began = self._clock()
        await work
        self.note_look(began, longest_s)

    async def _ask(self, timeout_s: float) -> None:
        try:
            if self._steps is None:
                answer = parsed(await self._worker.GetModel(worker_pb2.GetModelRequest(), timeout=timeout_s))
                self.max_length = answer.model.max_length or UNLIMITED
            call = self._worker.Watch(worker_pb2.WatchRequest(), timeout=timeout_s)
            try:
                load = parsed(await call.read())
            finally:
                call.cancel()
        except (grpc.RpcError, SlipstreamError):  # no answer in time, or none of a worker: frames must tell
            return
        if load is not grpc.aio.EOF and load.steps != self._steps:
            self._steps = load.steps
            self.note_progress()
