"""Workers behind one DNS name, such as a headless Service, or in one file: each address there is a worker, which may
come and go."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from slipstream.errors import InvalidArgument
from slipstream.telemetry.log_once import LogOnce

log = logging.getLogger(__name__)

SCHEME = "dns:///"
FILE = "file://"
"""Begins the path of a file with an address in each line."""
ADDRESS = re.compile(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")
Resolve = Callable[[str], Awaitable[Collection[str]]]
"""HOST:PORT -> every ADDRESS:PORT that it resolves to now. Raises OSError where it cannot be resolved."""


class Worker(Protocol):
    @property
    def away(self) -> bool:
        """True while it does not answer and nothing is under way there."""

    async def run(self) -> None: ...

    async def close(self) -> None: ...


W = TypeVar("W", bound=Worker)


def by_name(target: str, setting: str = "") -> bool:
    """Whether the target is a name with several addresses, `dns:///HOST:PORT`, or a file of them, `file:///PATH`.
    Raises InvalidArgument, which names the `setting`, for one without a host or a port, or without a whole path."""
    if target.startswith(FILE):
        if not target.removeprefix(FILE).startswith("/"):
            raise InvalidArgument(f"{setting} holds {target!r}; write {FILE}/PATH, with the whole path.")
        return True
    if not target.startswith(SCHEME):
        return False
    host, _, port = target.removeprefix(SCHEME).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidArgument(f"{setting} holds {target!r}; write {SCHEME}HOST:PORT, with a number as the port.")
    return True


async def resolve(target: str) -> Collection[str]:
    """Resolve by this machine's resolver, or read the file. A host with addresses of both kinds has one worker: IPv4
    is taken then."""
    if target.startswith(FILE):
        return await asyncio.to_thread(read_addresses, Path(target.removeprefix(FILE)))
    host, _, port = target.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    four = {f"{address[0]}:{port}" for family, *_, address in found if family == socket.AF_INET}
    return four or {f"[{address[0]}]:{port}" for family, *_, address in found if family == socket.AF_INET6}


def read_addresses(file: Path) -> list[str]:
    """HOST:PORT of each line; what stands behind a `#` is a comment. Raises OSError for a file that cannot be read or
    holds something else: then what was known stays."""
    lines = (line.partition("#")[0].strip() for line in file.read_text("utf-8", "replace").splitlines())
    found = [line for line in lines if line]
    if wrong := next((line for line in found if not ADDRESS.fullmatch(line)), None):
        raise OSError(f"{wrong[:64]!r} is not HOST:PORT")
    return found


class Discovery(Generic[W]):
    """Keeps `roster` up to date with the addresses of a name.

    A file lists the wanted workers; a worker that was taken out of it goes once it does not answer, too.
    DNS lists what can be found, not what works: a Service drops a pod that drains, and name servers fail. So a worker
    is removed once its name no longer lists it *and* it does not answer, and a lookup that fails changes nothing.
    """

    def __init__(self, target: str, make: Callable[[str], W], roster: list[W], changed: Callable[[], None]) -> None:
        """`make` takes ADDRESS:PORT. `changed` is called when the roster changed."""
        self.target = target
        """The target as configured."""
        self._host = target.removeprefix(SCHEME)
        self._make = make
        self._roster = roster
        self._changed = changed
        self._known: dict[str, tuple[W, asyncio.Task[None]]] = {}
        self._log_once = LogOnce(log, logging.WARNING)

    def found(self, worker: Worker) -> bool:
        """Whether the worker was found behind this name."""
        return any(worker is known for known, _ in self._known.values())

    async def run(self, resolve: Resolve, period_s: float) -> None:
        """Resolve the name every `period_s`, and run the workers that are found, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    try:
                        self._update(set(await resolve(self._host)), tasks)
                        self._log_once.log_recovery()
                    except (OSError, UnicodeError) as error:
                        self._log_once.log_problem(f"{self._host} cannot be resolved: {error}")
                    await asyncio.sleep(period_s)
        finally:
            for worker, _ in self._known.values():
                await worker.close()

    def _update(self, found: set[str], tasks: asyncio.TaskGroup) -> None:
        for address in sorted(found - self._known.keys()):
            worker = self._make(address)
            self._known[address] = worker, tasks.create_task(worker.run())
            self._roster.append(worker)
            log.info("%s is at %s", self._host, address)
        for address in sorted(self._known.keys() - found):
            worker, task = self._known[address]
            if worker.away:
                del self._known[address]
                self._roster.remove(worker)
                tasks.create_task(_close_worker(worker, task))
                log.info("%s is no longer at %s", self._host, address)
        self._changed()


async def _close_worker(worker: Worker, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    await worker.close()
