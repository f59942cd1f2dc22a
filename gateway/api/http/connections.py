"""The open connections of the HTTP listener, shared fairly between the addresses that they come from.

Whoever connects has no key yet. Where there are as many connections as there may be, a new one takes the place of an
idle one of the address that has the most; so whoever opens many loses its own, and a proxy, behind which all clients
have one address, loses what it does not use.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

SPARE = 64
"""Connections above the bound that are there for an answer to `/health`, or that there is no room."""


class OpenConnection(Protocol):
    @property
    def idle(self) -> bool:
        """Whether no request of it is being answered."""
        ...

    def abort(self) -> None: ...


class Connections:
    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._of_origin: dict[str, OrderedDict[OpenConnection, None]] = {}
        """Those that were used last come last."""

    def __len__(self) -> int:
        return self._count

    def add(self, connection: OpenConnection, origin: str) -> bool:
        """Whether there is room for its requests. Aborts it where there is not even room for a refusal."""
        self._of_origin.setdefault(origin, OrderedDict())[connection] = None
        self._count += 1
        if self._count > self._most:
            self._make_room(connection, origin)
        if self._count > self._most + SPARE:
            self.remove(connection, origin)
            connection.abort()
        return self._count <= self._most

    def note_use(self, connection: OpenConnection, origin: str) -> None:
        if connection in self._of_origin.get(origin, ()):
            self._of_origin[origin].move_to_end(connection)

    def remove(self, connection: OpenConnection, origin: str) -> None:
        """The connection is closed; nothing happens for one that was removed before."""
        own = self._of_origin.get(origin)
        if own is None or connection not in own:
            return
        del own[connection]
        self._count -= 1
        if not own:
            del self._of_origin[origin]

    def _make_room(self, newcomer: OpenConnection, origin: str) -> None:
        """Closes an idle connection of the origin that has the most, and at least as many as the newcomer's."""
        least = len(self._of_origin[origin])
        able = [each for each, known in self._of_origin.items() if len(known) >= least]
        for greedy in sorted(able, key=lambda each: len(self._of_origin[each]), reverse=True):
            for connection in self._of_origin[greedy]:
                if connection is not newcomer and connection.idle:
                    self.remove(connection, greedy)
                    connection.abort()
                    return
