"""The model's own thread: coroutines await it and never call torch themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class ModelThread:
    """Runs functions one at a time, in the order they were asked for. `threads` are torch's, inside an operator."""

    def __init__(self, threads: int = 1, name: str = "model") -> None:
        # OpenMP keeps the number per calling thread, so it is set on the model's thread itself.
        self._executor = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Starts the function; to be awaited for its result or exception. A cancelled caller stops waiting; a function
        that began still ends."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Waits for the running function; those not begun are cancelled. Closing twice is harmless."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)
