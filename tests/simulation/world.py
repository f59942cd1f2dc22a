"""One run: parties, clients, a storm of faults, and quiet afterwards. Everything in it is a function of the seed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from slipstream import completion
from slipstream.completion import Patience, complete
from slipstream.errors import ResourceExhausted, SlipstreamError, Unavailable
from slipstream.v1 import gateway_pb2
from tests.simulation import parties
from tests.simulation.clock import Party, PartyLoop
from tests.simulation.dialling import Channel
from tests.simulation.network import Network
from tests.simulation.store import Server
from tests.simulation.watching import PROMPT, Errors, Violation, Watched, demand, look, truth, unrest, words

FINISH_S, REST_S = 60.0, 20.0
"""Of virtual time after the storm: for the clients, and until nothing is left of their sessions."""
LEAVING = 0.15
"""Share of texts whose client goes away, maybe before their end."""
PATIENCE = Patience(resume_s=60.0, stall_s=2.0)


@dataclass(frozen=True, slots=True)
class Size:
    gateways: int = 2
    verifiers: int = 2
    drafters: int = 2
    hostile: int = 1
    """More drafters, which send anything."""
    clients: int = 4
    texts: int = 2
    """Of each client, one after the other."""
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
        self.verifiers = self._names("verifier", size.verifiers)
        self.drafters = self._names("drafter", size.drafters)
        self.hostile = self._names("hostile", size.hostile)
        self.gateways = self._names("gateway", size.gateways)
        self.alive: dict[str, Any] = {}
        """The present party at each address."""
        self.clients: dict[str, Party] = {}
        self.broken: Violation | None = None
        self._errors = errors
        self._failed = asyncio.Event()
        loop.turned = self._look

    @property
    def names(self) -> list[str]:
        return [*self.verifiers, *self.drafters, *self.hostile, *self.gateways]

    def start(self, name: str) -> None:
        """Empty, as a process starts."""
        self.network.note("start", name)
        kind = name.split()[0]
        if kind == "gateway":
            workers = self.verifiers, [*self.drafters, *self.hostile]
            self.alive[name] = parties.gateway(self.network, name, self.store, workers)
        else:
            self.alive[name] = getattr(parties, kind)(self.network, name)

    def kill(self, name: str) -> None:
        self.network.note("kill", name)
        party: Party = self.alive.pop(name).party
        self.network.hosts.pop(name)
        self.network.sever(party)
        party.kill()

    def party(self, name: str) -> Party:
        """Of those that live."""
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
        keeping = asyncio.create_task(self.network.keep_alive())
        clients = [self._client(number) for number in range(self.size.clients)]
        try:
            await self._or_failed(asyncio.create_task(storm(self)), 600.0, "the storm")
            await self._or_failed(asyncio.gather(*clients), FINISH_S, "the clients")
            await self._or_failed(asyncio.create_task(self._rest()), REST_S + 1.0, "rest")
        finally:
            keeping.cancel()
            for client, party in zip(clients, self.clients.values(), strict=True):
                client.cancel()
                party.thaw()
            for name in list(self.alive):
                self.kill(name)
            await self._end()

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
            left = self._unrest()
            if not left:
                return
            await asyncio.sleep(0.25)
        raise Violation(f"at rest {left}")

    def _unrest(self) -> str:
        return unrest(
            self.loop,
            self.of(self.gateways),
            self.of(self.verifiers),
            self.of([*self.drafters, *self.hostile]),
            self.store,
        )

    def _client(self, number: int) -> asyncio.Task[None]:
        party = self.clients[f"client {number}"] = Party(f"client {number}")
        chance = random.Random(self.chance.getrandbits(64))
        return party.spawn(self._talk(number, chance))

    async def _talk(self, number: int, chance: random.Random) -> None:
        for turn in range(self.size.texts):
            await asyncio.sleep(chance.uniform(0.0, 1.5))
            first = 1 + number + turn * self.size.clients
            tokens = chance.randint(self.size.least_tokens, self.size.most_tokens)
            patience_s = chance.uniform(0.05, 3.0) if chance.random() < LEAVING else None
            try:
                async with asyncio.timeout(patience_s):
                    said = await self._say(first, tokens, chance.randrange(len(self.gateways)))
                demand(said.token_ids == truth(first, tokens), f"text {first} ended as {said.token_ids}")
                demand(said.text == words(first, tokens), f"text {first} ended as {said.text!r}")
            except TimeoutError:
                self.network.counts["clients left"] += 1
            except SlipstreamError as error:
                self.fail(Violation(f"the client of text {first} was told {error.reason}: {error.message}"))
            except Violation as violation:
                self.fail(violation)
            self.network.counts["texts"] += 1

    async def _say(self, first: int, tokens: int, at: int) -> completion.Completion:
        request = gateway_pb2.GenerateRequest(max_tokens=tokens)
        request.sampling.temperature = 0.0
        request.prompt_token_ids.token_ids.extend([first, *PROMPT])
        lines: list[Any] = [Channel(self.network, name) for name in self.gateways]
        heard: list[str] = []
        for shift in itertools.count(at):
            shifted = [lines[(shift + number) % len(lines)] for number in range(len(lines))]
            try:
                return await complete(shifted[0], request, heard.append, shifted[1:], PATIENCE)
            except (Unavailable, ResourceExhausted):  # it never began: another try is another text
                if heard:
                    raise
                await asyncio.sleep(0.2)
        raise AssertionError

    def _look(self) -> None:
        if self.broken is not None:
            return
        try:
            look(self.of(self.verifiers), self.of([*self.drafters, *self.hostile]), self.store, self._errors)
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
        stack.callback(random.setstate, random.getstate())
        root = logging.getLogger()
        stack.callback(root.removeHandler, errors)
        root.addHandler(errors)
        random.seed(seed)  # backoffs
        unforeseen: list[str] = []
        loop.set_exception_handler(lambda _, told: unforeseen.append(f"{told['message']} {told.get('exception')!r}"))
        asyncio.set_event_loop(loop)
        stack.callback(asyncio.set_event_loop, None)

        async def main() -> None:
            world = World(loop, seed, size or Size(), errors)
            watched = type("Watched", (Watched,), {"store": world.store})
            try:
                with mock.patch.object(completion, "Completion", watched):
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
