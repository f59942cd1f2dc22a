"""One run: parties, clients, a storm of faults, and quiet afterwards. Everything in it is a function of the seed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from slipstream.client import client
from slipstream.concurrency import JITTER
from tests.simulation import parties
from tests.simulation.client import ERRANDS, Client
from tests.simulation.clock import Party, PartyLoop
from tests.simulation.network import Network
from tests.simulation.store import Server
from tests.simulation.text import Text
from tests.simulation.watching import Errors, Violation, Watched, demand, look, look_back, unrest

LINGER_S = 0.01
"""Seconds after a process's end in which its last messages arrive."""
RESTART_S = 0.2
FINISH_S, REST_S = 60.0, 20.0
"""Virtual seconds after the storm: for the clients, and until nothing is left of their sessions."""


@dataclass(frozen=True, slots=True)
class Size:
    gateways: int = 2
    verifiers: int = 2
    drafters: int = 2
    hostile: int = 1
    """More drafters, which send anything."""
    clients: int = 4
    texts: int = 2
    """Texts of each client, one after the other."""
    pause_s: float = 1.5
    """The longest before each."""
    errands: Mapping[str, float] = field(default_factory=lambda: ERRANDS)
    """What clients do with a text, and how often."""
    relaxed: float = 0.3
    """Share of worlds with relaxed durability."""
    gentle: bool = False
    """Whether no client may notice anything."""
    arithmetics: int = 1
    """Verifiers that write different texts under one model's name; at most as many as there are verifiers."""
    mixed: float = 0.4
    """Share of texts that may go on with another arithmetic, where there are several."""
    least_tokens: int = 12
    most_tokens: int = 40


@dataclass
class Report:
    seed: int
    trace: str = ""
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""


class World:
    def __init__(self, loop: PartyLoop, seed: int, size: Size, errors: Errors) -> None:
        self.loop = loop
        self.chance = random.Random(seed)
        self.size = size
        self.network = Network(loop, self.chance)
        self.store = Server(self.network)
        self.relaxed = self.chance.random() < size.relaxed
        self.texts: dict[int, Text] = {}
        """By their first token."""
        self.poisons: dict[int, int] = {}
        """By the first token of a text, the length from which every pass with it fails."""
        self.watched: type[Watched] = type("Watched", (Watched,), {"world": self})
        self.verifiers = self._names("verifier", size.verifiers)
        self.drafters = self._names("drafter", size.drafters)
        self.hostile = self._names("hostile", size.hostile)
        self.gateways = self._names("gateway", size.gateways)
        self.alive: dict[str, Any] = {}
        """The present party at each address."""
        self.leaving: set[str] = set()
        """Names of the live parties that drain."""
        self.clients: dict[str, Party] = {}
        self.broken: Violation | None = None
        self._errors = errors
        self._failed = asyncio.Event()
        loop.turned = self._look

    @property
    def proposers(self) -> list[str]:
        return [*self.drafters, *self.hostile]

    @property
    def names(self) -> list[str]:
        return [*self.verifiers, *self.proposers, *self.gateways]

    def start(self, name: str) -> None:
        """Empty, as a process starts."""
        self.network.note("start", name)
        kind = name.split()[0]
        if kind == "gateway":
            workers = self.verifiers, self.proposers
            self.alive[name] = parties.gateway(self.network, name, self.store, workers, relaxed=self.relaxed)
        elif kind == "verifier":
            self.alive[name] = parties.verifier(self.network, name, self.poisons, self._arithmetic(name))
        else:
            self.alive[name] = getattr(parties, kind)(self.network, name)

    def _arithmetic(self, verifier: str) -> int | None:
        """The number of a verifier's arithmetic. Each has an address of its own, and those beyond are of another one
        whenever they start."""
        most, number = self.size.arithmetics, self.verifiers.index(verifier)
        if most == 1:
            return None
        return number if number < most else self.chance.randrange(most)

    def kill(self, name: str) -> None:
        self.network.note("kill", name)
        party: Party = self.alive.pop(name).party
        self.network.hosts.pop(name, None)  # unless it was drained
        self.network.sever(party)
        party.kill()

    async def drain(self, name: str) -> bool:
        """As on SIGTERM: whether it ended by itself, and was not killed meanwhile."""
        self.network.note("drain", name)
        ending = self.alive[name]
        self.leaving.add(name)
        await asyncio.wait([ending.party.spawn(ending.drain())])
        await asyncio.sleep(LINGER_S)
        self.leaving.discard(name)
        if self.alive.get(name) is not ending:
            return False
        self.kill(name)
        return True

    def party(self, name: str) -> Party:
        """The live party with this name."""
        party: Party = self.clients[name] if name in self.clients else self.alive[name].party
        return party

    def of(self, names: list[str]) -> list[Any]:
        return [self.alive[name] for name in names if name in self.alive]

    def fail(self, violation: Violation) -> None:
        self.broken = self.broken or violation
        self._failed.set()

    async def run(self, storm: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        """Raises Violation."""
        for name in self.names:
            self.start(name)
        keeping = [asyncio.create_task(each) for each in (self.network.keep_alive(), self._supervise())]
        clients = [Client(self, number) for number in range(self.size.clients)]
        self.clients = {client.party.name: client.party for client in clients}
        talks = [client.talk() for client in clients]
        try:
            await self._or_failed(asyncio.create_task(storm(self)), 600.0, "the storm")
            await self._or_failed(asyncio.gather(*talks), FINISH_S, "the clients")
            await self._or_failed(asyncio.create_task(self._rest()), REST_S + 1.0, "rest")
            if self.size.gentle:
                look_back(self)
        finally:
            for task in keeping:
                task.cancel()
            for client, talk in zip(clients, talks, strict=True):
                talk.cancel()
                client.party.thaw()
            for name in list(self.alive):
                self.kill(name)
            await self._end()

    async def _supervise(self) -> None:
        """Starts verifiers again that ended by themselves."""
        while True:
            await asyncio.sleep(RESTART_S)
            for name in self.verifiers:
                if name in self.alive and name not in self.leaving and self.alive[name].decoding.done():
                    self.network.counts["verifiers ended"] += 1
                    self.kill(name)
                    self.start(name)

    async def _or_failed(self, work: asyncio.Future[Any], seconds: float, what: str) -> None:
        failed = asyncio.create_task(self._failed.wait())
        done, _ = await asyncio.wait([work, failed], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if not work.done():
            work.cancel()
        if self.broken is not None:
            raise self.broken
        demand(work in done, f"{what} did not come to an end within {seconds} s")
        work.result()

    async def _rest(self) -> None:
        for _ in range(int(REST_S / 0.25)):
            left = unrest(self)
            if not left:
                return
            await asyncio.sleep(0.25)
        raise Violation(f"at rest {left}")

    def _look(self) -> None:
        if self.broken is not None:
            return
        try:
            look(self, self._errors)
        except Violation as violation:
            self.fail(violation)

    async def _end(self) -> None:
        """Every task comes to an end."""
        for _ in range(50):
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            if not tasks:
                return
            for task in sorted(tasks, key=hash):
                task.cancel()
            await asyncio.sleep(0.01)
        raise Violation(f"tasks that do not end: {sorted(map(str, tasks))}")

    @staticmethod
    def _names(kind: str, count: int) -> list[str]:
        return [f"{kind} {letter}" for letter in "abcdefgh"[:count]]


def run(seed: int, storm: Callable[[World], Coroutine[Any, Any, None]], size: Size | None = None) -> Report:
    """Never raises a Violation: it is in the report."""
    report, errors = Report(seed), Errors()
    loop = PartyLoop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        stack.callback(JITTER.setstate, JITTER.getstate())
        root = logging.getLogger()
        stack.callback(root.removeHandler, errors)
        root.addHandler(errors)
        JITTER.seed(seed)
        unforeseen: list[str] = []
        loop.set_exception_handler(
            lambda _, context: unforeseen.append(f"{context['message']} {context.get('exception')!r}")
        )
        asyncio.set_event_loop(loop)
        stack.callback(asyncio.set_event_loop, None)

        async def main() -> None:
            world = World(loop, seed, size or Size(), errors)
            try:
                with mock.patch.object(client, "Completion", world.watched):
                    await world.run(storm)
            except Violation as violation:
                report.failure = str(violation)
            report.trace, report.seconds = world.network.trace.hexdigest(), loop.now
            report.counts = deepcopy(world.network.counts)

        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_asyncgens())
        if unforeseen and not report.failure:
            report.failure = f"nobody handled: {unforeseen}"
    return report
