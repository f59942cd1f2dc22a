"""What must hold at every moment, and what must be left when all is over."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.routing.drafters import DrafterWorker
from gateway.routing.verifiers import VerifierWorker
from gateway.routing.worker_watch import WorkerWatch
from gateway.sessions.registry import SessionRegistry
from gateway.store.session_store import unpack_tokens
from gateway.store.write_behind import WriteBehindQueue
from slipstream.client.completion import Completion, Event
from slipstream.proposers.drafting.scheduler import DraftScheduler
from slipstream.rpc.multiplexed_stream import MultiplexedStream, SendQueue
from slipstream.speculation.frame import TreeLimits
from slipstream.v1.verifier_pb2 import FINISH_REASON_CANCELLED
from tests.simulation.clock import NumberedTask
from tests.simulation.parties import DrafterParty, GatewayParty, VerifierParty
from tests.simulation.text import Output, Text, words
from tests.support.hostile_drafter import HostileDrafter
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.drafter_link import DrafterLink
from verifier_svc.sources.liveness import LivenessMonitor

if TYPE_CHECKING:
    from tests.simulation.world import World

LASTING = {
    DrafterWorker.run.__qualname__: "a watch of a drafter",
    DrafterLink.run.__qualname__: "a link to a drafter",
    CandidateSources.run.__qualname__: "the verifier's sources of candidates",
    HostileDrafter.Draft.__qualname__: "a hostile stream",
    MultiplexedStream._write.__qualname__: "a link",
    MultiplexedStream.run.__qualname__: "a link",
    SendQueue.overflow.__qualname__: "a link, either end",
    WorkerWatch.run.__qualname__: "a watch",
    WorkerWatch.read_again.__qualname__: "a watch",
    DraftScheduler.run.__qualname__: "a drafter's loop",
    Scheduler.run.__qualname__: "a verifier's loop",
    WriteBehindQueue.run.__qualname__: "a gateway",
    SessionRegistry.keep_leases.__qualname__: "a gateway",
    VerifierWorker.run.__qualname__: "a gateway's verifier",
    LivenessMonitor.run.__qualname__: "a verifier's drafter",
    "Serving._run": "a stream that lasts",
    "serve.<locals>.write": "a stream that lasts",
}
"""Tasks of a party at rest."""


OUTAGE = "the session store is away"
"""Logged by a gateway that cannot write the end of its relaxed sessions."""


CULPRIT = "a session fails every step it is in"
"""Logged by a verifier that ends a poisoned session."""


class Violation(AssertionError):
    """A promise that was broken."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Watched(Completion):
    """A client's completion, looked at after each event."""

    world: World
    edited: Sequence[Output] = ()
    """The edited outputs of which it must get one; none without an edit."""
    losses = 0
    """Losses of the store when it was edited: another loss may bring the former text back."""
    starts = 0

    def take(self, response: Event) -> str:
        received = super().take(response)
        self.starts += response.WhichOneof("event") == "started"
        if self.started.prompt_token_ids:
            text = self.world.texts[self.started.prompt_token_ids[0]]
            text.completion = self
            now, versions = tuple(self.token_ids), self.versions(text)
            right = [version for version in versions if version[: len(now)] == now]
            demand(
                bool(right) or (text.mixed and text.may_say(now)),
                f"client of text {text.first} has {now}, not {versions}",
            )
            self._check_logged(text)
            if text.mixed:
                return received
            wholes = [words(now if self.finished.reason else version) for version in right]
            if self.finished.reason == FINISH_REASON_CANCELLED:  # a relaxed session may have shown more than is left
                wholes += [words(version) for version in right]
            demand(any(whole.startswith(self.text) for whole in wholes), f"text {text.first} reads {self.text!r}")
        return received

    def versions(self, text: Text) -> list[Output]:
        """Outputs that it may get."""
        if not self.edited:
            return text.originals
        return [*self.edited, *(text.originals if self.losses != self.world.store.losses else ())]

    def _check_logged(self, text: Text) -> None:
        name, store = self.started.session_id, self.world.store
        if self.world.relaxed or (name in store.may_cut and not self.edited):
            return
        logged = store.longest.get(name, 0)
        demand(len(self.token_ids) <= logged, f"client of text {text.first} saw more than the {logged} tokens logged")


class Errors(logging.Handler):
    """What the services themselves call a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.received: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self._thread:  # an exporter of spans that another test left behind, for example
            return
        if record.getMessage().startswith((OUTAGE, CULPRIT)):
            return
        self.received.append(
            f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage()
        )


def look(world: World, errors: Errors) -> None:
    """After every event. Raises Violation."""
    verifiers, drafters, store = world.of(world.verifiers), world.of(world.proposers), world.store
    demand(not errors.received, f"errors were logged: {errors.received}")
    demand(not store.lost, f"a log was cut: {store.lost}")
    for verifier in verifiers:
        _look_at_verifier(verifier, world.texts)
    for drafter in drafters:
        if drafter.scheduler is not None:
            demand(len(drafter.scheduler) <= 64, "a drafter has more sessions than it may")
    for name, entry in store.memory.entries.items():
        right = world.texts[entry.tokens[0]].may_log(entry.tokens)
        demand(right, f"the log of session {name} holds {unpack_tokens(bytes(entry.tokens))}")


def _look_at_verifier(verifier: VerifierParty, texts: dict[int, Text]) -> None:
    pool, limits = verifier.engine.kv._pool, TreeLimits()
    used = int((pool._counts > 0).sum())
    demand(verifier.engine.refused is None, f"a step was refused: {verifier.engine.refused}")
    demand(pool.free + used == pool.total, f"{pool.free} KV blocks free and {used} in use of {pool.total}")
    for session in verifier.scheduler._sessions:
        demand(session.computed <= len(session.tokens), "more KV than tokens")
        demand(session.tree.node_count <= limits.nodes, "a candidate tree beyond its limits")
        right = texts[session.tokens[0]].may_say(session.tokens[session.request.prompt_length :])
        demand(right, f"a verifier's session holds {session.tokens}")


def look_back(world: World) -> None:
    """When all is over and nothing was to be noticed: every text came on one stream, and is logged."""
    for text in world.texts.values():
        assert text.completion is not None
        name, received = text.completion.started.session_id, text.completion.token_ids
        demand(text.completion.starts == 1, f"text {text.first} came in {text.completion.starts} pieces")
        ended = name in world.store.memory.entries and bool(world.store.memory.entries[name].outcome)
        logged = world.store.logged(name)
        demand(ended and logged == (*text.prompt, *received), f"the log of text {text.first} has {logged}, {ended=}")


def unrest(world: World) -> str:
    """What is left of sessions, in words; nothing once nothing is left."""
    gateways: list[GatewayParty] = world.of(world.gateways)
    verifiers: list[VerifierParty] = world.of(world.verifiers)
    drafters: list[DrafterParty] = world.of(world.proposers)
    left: list[str] = []
    for gateway in gateways:
        left += [f"{gateway.party.name} knows session {name}" for name in gateway.sessions._entries]
        unwritten = gateway.write_behind is not None and gateway.write_behind._pending
        left += [f"{gateway.party.name} has something to write"] * bool(unwritten)
    for verifier in verifiers:
        name, engine = verifier.party.name, verifier.engine
        left += [f"{name} has {len(verifier.scheduler)} sessions"] * bool(len(verifier.scheduler))
        left += [f"{name} has {engine.kv.blocks_total - engine.kv.blocks_free} KV blocks in use"] * (
            engine.kv.blocks_free < engine.kv.blocks_total
        )
        left += [f"{name} remembers sessions"] * bool(verifier.service.by_id)
    for drafter in drafters:
        count = 0 if drafter.scheduler is None else len(drafter.scheduler)
        left += [f"{drafter.party.name} has {count} sessions"] * bool(count)
    left += [f"{world.store.leases()} leases run"] * bool(world.store.leases())
    left += [f"{count} tasks {name}" for name, count in sorted(_others(gateways, verifiers, drafters).items())]
    return ", ".join(left)


def _others(*parties: list[GatewayParty] | list[VerifierParty] | list[DrafterParty]) -> Counter[str]:
    """Tasks that no party at rest has."""
    names: Counter[str] = Counter()
    for group in parties:
        for each in group:
            for task in each.party.tasks():
                assert isinstance(task, NumberedTask)
                name = getattr(task.get_coro(), "__qualname__", "")
                if name not in LASTING:
                    names[f"{each.party.name}: {name}"] += 1
    return names
