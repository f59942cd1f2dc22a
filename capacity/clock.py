"""Virtual time: an event loop whose clock jumps to the next timer, and a model thread that is busy for as long as its
engine says. `capacity.workers` runs the verifier's and the drafter's own code on it, as `benchmarks.virtual` and the
simulation of the tests do.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it would have waited."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class LoneLoop(VirtualLoop):
    """Nothing comes from outside, so the system is never asked. Raises RuntimeError where nothing can happen any more:
    every task waits for another one."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Lone(self)


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.now += timeout
        return ready


class _Lone(_Jumping):
    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing can happen any more: every task waits for another one")
        self._loop.now += timeout
        return []


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualThread:
    """For `ModelThread`: runs functions one at a time, each for as long as it sleeps."""

    def __init__(self) -> None:
        self.engine_s = 0.0
        self._jobs: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._busy = False

    def sleep(self, seconds: float) -> None:
        self.engine_s += seconds

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._jobs.append((future, partial(function, *args)))
        if not self._busy:
            self._begin()
        return future

    def _begin(self) -> None:
        self._busy = True
        future, function = self._jobs.popleft()
        before = self.engine_s
        try:
            settle = partial(future.set_result, function())
        except Exception as error:
            settle = partial(future.set_exception, error)
        asyncio.get_running_loop().call_later(self.engine_s - before, self._end, future, settle)

    def _end(self, future: asyncio.Future[Any], settle: Callable[[], None]) -> None:
        if not future.done():  # its caller may have been cancelled
            settle()
        self._busy = False
        if self._jobs:
            self._begin()
