"""While a leader has no steps to take, the other ranks of its group hear that it lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol, runtime_checkable

from slipstream.engine.model_thread import ModelThread
from slipstream.engine.tensor_parallel.group import GroupLost

BEATS = 4
"""In the time after which a silent leader is given up."""


@runtime_checkable
class Leader(Protocol):
    """`slipstream.engine.tensor_parallel.parallel.LeadingEngine`, which is not imported where no model is loaded."""

    lost: GroupLost | None

    def beat(self, every_s: float) -> None: ...

    def end(self) -> None: ...


@asynccontextmanager
async def leading(engine: object, thread: ModelThread, timeout_s: float) -> AsyncIterator[None]:
    """For as long as the block runs the other ranks, if there are any, hear of the leader, and at its end they are told
    to end too. A lost group ends the block with GroupLost."""
    if not isinstance(engine, Leader):
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(_beating(engine, thread, timeout_s / BEATS))
        try:
            yield
        finally:
            beating.cancel()
            if engine.lost is None:
                await thread.run(engine.end)


async def _beating(engine: Leader, thread: ModelThread, every_s: float) -> NoReturn:
    while True:
        await asyncio.sleep(every_s / 2)
        await thread.run(engine.beat, every_s)
