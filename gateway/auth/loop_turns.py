"""Tenants take turns on the event loop: callbacks of one tenant's requests hold up another one's by one of each.

asyncio runs callbacks in the order in which they became ready. A tenant with 256 requests, be they refused for
nothing, so had 256 callbacks run before each of another tenant's, and a text of that one needs several for every token.
Here ready callbacks stand in one queue for each tenant, and the queues take turns. A callback's tenant is that of the
task, or callback, that made it (`TENANT`, a context variable). Those of no tenant, which read sockets, look at keys
and set timers, have OWN turns in a row. Sockets are looked at after every PASS callbacks, so that what arrives is seen
soon.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextvars import ContextVar
from typing import Any

OWN = 4
"""Callbacks of no tenant for each one of a tenant."""
PASS = 8
"""Callbacks between two looks at sockets and timers, which cost some 10 µs."""
TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Name of the tenant whose request this is; empty for none."""


class ReadyCallbacks:
    """In place of an event loop's deque of ready handles, of which it uses just these methods."""

    def __init__(self) -> None:
        self._own: deque[Any] = deque()
        """Of no tenant."""
        self._in_a_row = 0
        """Of those, since the last one of a tenant."""
        self._queues: OrderedDict[str, deque[Any]] = OrderedDict()
        """By tenant, the one whose turn is next first; none is empty."""

    def append(self, handle: Any) -> None:
        tenant = handle._context.get(TENANT, "")
        if not tenant:
            self._own.append(handle)
        elif (queue := self._queues.get(tenant)) is not None:
            queue.append(handle)
        else:
            self._queues[tenant] = deque([handle])

    def popleft(self) -> Any:
        """Raises IndexError where there is none."""
        if not self._queues or (self._own and self._in_a_row < OWN):
            self._in_a_row += 1
            return self._own.popleft()
        self._in_a_row = 0
        tenant, queue = self._queues.popitem(last=False)
        handle = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # last: the others have their turns first
        return handle

    def __len__(self) -> int:
        """How many the loop is to run before it looks at its sockets again."""
        ready = len(self._own)
        for queue in self._queues.values():
            ready += len(queue)
            if ready >= PASS:
                break
        return min(ready, PASS)

    def clear(self) -> None:
        self._own.clear()
        self._queues.clear()


def take_turns(loop: asyncio.AbstractEventLoop) -> None:
    """Lets tenants take turns on a loop of asyncio's own; on others nothing changes."""
    waiting = getattr(loop, "_ready", None)
    if isinstance(loop, asyncio.BaseEventLoop) and isinstance(waiting, deque):
        ready = ReadyCallbacks()
        for handle in waiting:
            ready.append(handle)
        loop._ready = ready  # type: ignore[attr-defined]
