"""What must hold at every moment, and what must be left when all is over."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache

from benchmarks.virtual import VirtualThread
from gateway.store.record import pack, unpack
from gateway.transcript import Transcript
from slipstream.completion import Completion, Event
from slipstream.frame import Limits
from tests.simulation.clock import NumberedTask, PartyLoop
from tests.simulation.parties import DrafterParty, GatewayParty, VerifierParty, target, tokenizer
from tests.simulation.store import Server

PROMPT = (8, 9)
"""Behind each text's own first token."""
LASTING = {
    "Drafter.run": "a link or a watch of a drafter",
    "Drafters.run": "the verifier's drafters",
    "HostileDrafter.Draft": "a hostile stream",
    "Link._write": "a link",
    "Link.run": "a link",
    "Outbox.overflow": "a link, either end",
    "Presence.run": "a watch",
    "Scheduler.run": "a worker's loop",
    "Serving._run": "a stream that lasts",
    "Sessions.keep_leases": "a gateway",
    "Verifier.run": "a gateway's verifier",
    "Vigil.run": "a verifier's drafter",
    "serve.<locals>.write": "a stream that lasts",
}
"""Tasks of a party at rest."""


class Violation(AssertionError):
    """A promise that was broken."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@cache
def truth(first: int, tokens: int) -> list[int]:
    """What the target says after a text's prompt."""
    return target(VirtualThread(), 1).text([first, *PROMPT], tokens)


@cache
def _logged(first: int) -> bytes:
    """A text's log, as the store has it; the first byte says which text."""
    return pack([first, *PROMPT, *truth(first, MOST_TOKENS)])


@cache
def words(first: int, tokens: int) -> str:
    transcript = Transcript(tokenizer().detokenizer(), [])
    return transcript.push(truth(first, tokens)) + transcript.finish()


MOST_TOKENS = 256


class Watched(Completion):
    """A client's completion, looked at after each event."""

    store: Server

    def take(self, response: Event) -> str:
        text = super().take(response)
        if self.started.prompt_token_ids:
            first = self.started.prompt_token_ids[0]
            said = truth(first, MOST_TOKENS)[: len(self.token_ids)]
            demand(self.token_ids == said, f"client of text {first} has {self.token_ids}, not {said}")
            logged = self.store.longest.get(self.started.session_id, 0)
            demand(len(self.token_ids) <= logged, f"client of text {first} saw more than the {logged} tokens logged")
            end = words(first, len(self.token_ids)) if self.finished.reason else words(first, MOST_TOKENS)
            demand(end.startswith(self.text), f"client of text {first} has the text {self.text!r}, not {end!r}")
        return text


class Errors(logging.Handler):
    """What the services themselves call a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())


def look(verifiers: list[VerifierParty], drafters: list[DrafterParty], store: Server, errors: Errors) -> None:
    """After every event. Raises Violation."""
    demand(not errors.said, f"errors were logged: {errors.said}")
    demand(not store.lost, f"a log was cut: {store.lost}")
    for verifier in verifiers:
        _look_at_verifier(verifier)
    for drafter in drafters:
        if drafter.scheduler is not None:
            demand(len(drafter.scheduler) <= 64, "a drafter has more sessions than it may")
    for name, entry in store.memory.entries.items():
        right = _logged(entry.tokens[0]).startswith(entry.tokens)
        demand(right, f"the log of session {name} holds {unpack(bytes(entry.tokens))}")


def _look_at_verifier(verifier: VerifierParty) -> None:
    pool, limits = verifier.engine._pool, Limits()
    used = int((pool._counts > 0).sum())
    demand(pool.free + used == pool.total, f"{pool.free} KV blocks free and {used} in use of {pool.total}")
    for session in verifier.scheduler._sessions:
        demand(session.computed <= len(session.tokens), "more KV than tokens")
        demand(session.tree.node_count <= limits.nodes, "a candidate tree beyond its limits")
        said = truth(session.tokens[0], MOST_TOKENS)[: len(session.tokens) - session.prompt_length]
        demand(session.tokens[session.prompt_length :] == said, f"a verifier's session holds {session.tokens}")


def unrest(
    loop: PartyLoop,
    gateways: list[GatewayParty],
    verifiers: list[VerifierParty],
    drafters: list[DrafterParty],
    store: Server,
) -> str:
    """What is left of sessions, in words; nothing once nothing is left."""
    left: list[str] = []
    for gateway in gateways:
        left += [f"{gateway.party.name} knows session {name}" for name in gateway.sessions._known]
    for verifier in verifiers:
        name, engine = verifier.party.name, verifier.engine
        left += [f"{name} has {len(verifier.scheduler)} sessions"] * bool(len(verifier.scheduler))
        left += [f"{name} has {engine.blocks_total - engine.blocks_free} KV blocks in use"] * (
            engine.blocks_free < engine.blocks_total
        )
        left += [f"{name} remembers sessions"] * bool(verifier.service.by_id)
    for drafter in drafters:
        count = 0 if drafter.scheduler is None else len(drafter.scheduler)
        left += [f"{drafter.party.name} has {count} sessions"] * bool(count)
    left += [f"{store.leases()} leases run"] * bool(store.leases())
    left += [f"{count} tasks {name}" for name, count in sorted(_others(loop, gateways, verifiers, drafters).items())]
    return ", ".join(left)


def _others(loop: PartyLoop, *parties: list[GatewayParty] | list[VerifierParty] | list[DrafterParty]) -> Counter[str]:
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
