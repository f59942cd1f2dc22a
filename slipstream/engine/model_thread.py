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
HAND_OVER_S = 0.0005
"""Most seconds that a caller waits for its function to begin: more than a free core takes, and little where none is."""


class ModelThread:
    """Runs functions one at a time, in the order of the calls. `threads` are torch's, inside an operator; 0
    for functions that never call torch: then it is not loaded.

    Every step is handed over twice; an executor's futures, locks and callbacks would double what that takes. So would a
    caller that goes on at once: the thread that it woke needs Python's lock, which others give away only as they wait
    for something, or after `sys.getswitchinterval()`.
    """

    def __init__(self, threads: int = 1, name: str = "model") -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._idle = False
        """Whether the thread waits for a function."""
        self._begun = threading.Event()
        """Set as a function begins."""
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, args=[threads], name=name, daemon=True)
        self._thread.start()

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Starts the function, which on an idle thread has mostly begun on return; to be awaited for its result or
        exception. A cancelled caller stops waiting; a function that began still ends. Raises RuntimeError once closed.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        with self._lock:  # nothing may stand behind the end
            if self._closed:
                raise RuntimeError("the model's thread is closed")
            idle = self._idle
            self._begun.clear()
            self._jobs.put(_Job(partial(function, *args, **kwargs), future))
        if idle:
            self._begun.wait(HAND_OVER_S)
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
        while (job := self._next()) is not None:
            if self._closed:
                job.notify_loop(job.future.cancel)
            else:
                job.run()
            del job  # what it holds is not kept while nothing runs

    def _next(self) -> _Job | None:
        self._idle = True
        job = self._jobs.get()
        self._idle = False
        self._begun.set()
        return job


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
