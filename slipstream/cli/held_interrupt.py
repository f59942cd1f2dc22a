"""Ctrl-C between the pieces of a text: what a command printed and what it counts as printed never differ."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class HeldInterrupt:
    """Raises KeyboardInterrupt as Python does by itself, but not within `held`: there it waits until the end.

    It changes nothing outside of the main thread, or where Ctrl-C is ignored or handled otherwise.
    """

    def __init__(self) -> None:
        self._holding = self._waits = self._installed = False

    def __enter__(self) -> HeldInterrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._receive)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets the body end before an interrupt is raised."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._waits:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self._waits = True
