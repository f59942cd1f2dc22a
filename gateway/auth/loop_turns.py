"""Tenants take turns on the event loop: callbacks of one tenant's requests hold up another one's by one of each.

asyncio runs callbacks in the order in which they became ready. A tenant with 256 requests, be they refused for
nothing, so had 256 callbacks run before each of another tenant's, and a text of that one needs several for every token.
Here callbacks stand in one queue for each tenant, and the queues take turns. A callback's tenant is that of the task or
callback that made it (`TENANT`, a context variable). Those of no tenant, which look at keys and begin requests, have
OWN turns in a row. At most PASS callbacks run, and FEW sockets are read, between two looks at the sockets, so that what
arrives is seen soon.

Nothing here is private to asyncio: tasks and futures call `call_soon`, which a loop may define, and a loop of selectors
takes any selector.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVarTuple

OWN = 4
"""Callbacks of no tenant for each one of a tenant."""
PASS = 8
"""Callbacks between two looks at sockets and timers, which cost some 10 µs."""
FEW = 4
"""Sockets that are read and written between two looks at all."""
Ts = TypeVarTuple("Ts")
TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Name of the tenant whose request this is; empty for none."""


class ReadyCallbacks:
    """Handles that are ready, in one queue for each tenant."""

    def __init__(self) -> None:
        self._own: deque[Any] = deque()
        """Callbacks of no tenant."""
        self._in_a_row = 0
        """Number of those that ran since the last callback of a tenant."""
        self._queues: OrderedDict[str, deque[Any]] = OrderedDict()
        """By tenant, the one whose turn is next first; none is empty."""
        self._count = 0

    def append(self, tenant: str, handle: Any) -> None:
        self._count += 1
        if not tenant:
            self._own.append(handle)
        elif (queue := self._queues.get(tenant)) is not None:
            queue.append(handle)
        else:
            self._queues[tenant] = deque([handle])

    def popleft(self) -> Any:
        """Raises IndexError where there is none."""
        if not self._queues or (self._own and self._in_a_row < OWN):
            handle = self._own.popleft()
            self._in_a_row += 1
        else:
            self._in_a_row = 0
            tenant, queue = self._queues.popitem(last=False)
            handle = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # last: the others have their turns first
        self._count -= 1
        return handle

    def __len__(self) -> int:
        return self._count


class WaitingCallback(asyncio.Handle):
    """A callback that waits for its turn."""

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], loop: asyncio.AbstractEventLoop, context: Context
    ) -> None:
        super().__init__(callback, args, loop, context)
        self._given = callback, args, context

    def take(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.cancelled():
            return
        callback, args, context = self._given
        del self._given
        try:
            context.run(callback, *args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            message = "a callback of the event loop failed"
            loop.call_exception_handler({"message": message, "exception": error, "handle": self})


class FairLoop(asyncio.SelectorEventLoop):
    """A loop on which tenants take turns."""

    def __init__(self) -> None:
        self._turns = ReadyCallbacks()
        self._turns_scheduled = False
        self._nobody = copy_context()
        super().__init__(_FewAtATime())

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        context = copy_context() if context is None else context
        handle = WaitingCallback(callback, args, self, context)
        self._turns.append(context.get(TENANT, ""), handle)
        if not self._turns_scheduled:
            self._turns_scheduled = True
            super().call_soon(self._take_turns, context=self._nobody)
        return handle

    def close(self) -> None:
        super().close()
        self._turns = ReadyCallbacks()

    def _take_turns(self) -> None:
        left = PASS
        try:
            while self._turns and left:
                left -= 1
                self._turns.popleft().take(self)
        finally:
            self._turns_scheduled = bool(self._turns)
            if self._turns_scheduled:
                super().call_soon(self._take_turns, context=self._nobody)


class _FewAtATime(selectors.BaseSelector):
    """A selector that returns FEW sockets at a time, each of those that are ready once before any again."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ready: deque[tuple[selectors.SelectorKey, int]] = deque()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._ready:
            self._ready.extend(self._selector.select(timeout))
        found: list[tuple[selectors.SelectorKey, int]] = []
        known = self._selector.get_map()
        while self._ready and len(found) < FEW:
            key, events = self._ready.popleft()
            now = known.get(key.fd)  # it may have been closed, or be waited for otherwise, meanwhile
            if now is not None and now.events & events:
                found.append((now, now.events & events))
        return found

    def close(self) -> None:
        self._ready.clear()
        self._selector.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()
