"""A value that several tasks wait for and one of them has computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """A value that is computed when it is first asked for, and given up once no task waits for it any more."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._task: asyncio.Task[T] | None = None
        self._waiting = 0

    async def get(self) -> T:
        """Raises what computing it raises."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._task.cancel()

    async def _run(self) -> T:
        return await self._make()
