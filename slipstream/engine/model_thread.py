"""The model's own thread: coroutines await it and never call torch themselves."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ModelThread:
    """Runs functions one at a time, in the order of the calls. `threads` are torch's, inside an operator; 0
    for functions that never call torch: then it is not loaded.

    Every step is handed over twice; an executor's futures, locks and callbacks would double what that takes.
    """

    def __init__(self, threads: int = 1, name: str = "model") -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, args=[threads], name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Starts the function; to be awaited for its result or exception. A cancelled caller stops waiting; a function
        that began still ends. Raises RuntimeError once closed."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        with self._lock:  # nothing may stand behind the end
            if self._closed:
                raise RuntimeError("the model's thread is closed")
            self._jobs.put(_Job(partial(function, *args, **kwargs), future))
        return future

    def close(self) -> None:
        """Waits for the running function; those not begun are cancelled. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _work(self, threads: int) -> None:
        if threads:
            import_module("torch").set_num_threads(threads)  # OpenMP keeps the number per calling thread
        while (job := self._jobs.get()) is not None:
            if self._closed:
                job.notify_loop(job.future.cancel)
            else:
                job.run()
            del job  # what it holds is not kept while nothing runs


class _Job(NamedTuple):
    function: Callable[[], Any]
    future: asyncio.Future[Any]

    def run(self) -> None:
        try:
            result = self.function()
        except BaseException as error:
            self.notify_loop(partial(self._settle, self.future.set_exception, error))
        else:
            self.notify_loop(partial(self._settle, self.future.set_result, result))

    def notify_loop(self, what: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits any more
            self.future.get_loop().call_soon_threadsafe(what)

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        if not self.future.done():
            settle(outcome)
