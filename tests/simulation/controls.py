"""Rules of the protocol, each switched off: a simulation that does not notice proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from gateway.requests.resolved_request import ResolvedRequest
from gateway.requests.validation import RequestValidator
from gateway.routing.verifier_session import VerifierSession
from gateway.routing.verifiers import VerifierWorker
from gateway.routing.worker_watch import WorkerWatch
from gateway.sessions import run
from gateway.sessions.entry import SessionEntry
from gateway.sessions.output_stream import OutputStream
from gateway.sessions.ownership import SessionOwnership
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.run import SessionRun
from gateway.sessions.verifier_search import VerifierSearch
from gateway.store.memory import MemoryStore
from gateway.store.session_log import SessionLog
from slipstream.client.completion import Completion
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.segment import KVSequence
from slipstream.errors import Internal
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.simulation import parties
from tests.simulation.storm import Storm, honest_storm, restarts, storm
from tests.simulation.world import Size
from verifier_svc.execution.executor import ScheduledSequence, StepOutcome
from verifier_svc.execution.fault_isolation import FaultIsolation
from verifier_svc.service import GatewayStream
from verifier_svc.sources import flow_control


def _ungated(self: VerifierSession, done: verifier_pb2.Round) -> None:
    self._length += len(done.token_ids)
    self._received.rounds.append(done)
    self._filled.set()


async def _show_first(self: SessionRun, rounds: list[verifier_pb2.Round]) -> None:
    tokens = [token for done in rounds for token in done.token_ids]
    if tokens:
        self._stream.append_tokens(tokens)
        await self._log.append(tokens)


def _believe(self: Completion, delta: gateway_pb2.Delta) -> str:
    self.token_ids += delta.token_ids
    self.text += delta.text
    return delta.text


def _without(owner: Any, name: str, instead: Any) -> Callable[[ExitStack], Any]:
    return lambda stack: stack.enter_context(mock.patch.object(owner, name, instead))


async def _run_only(self: SessionEntry, log: SessionLog, arrived_at: float) -> None:
    await self._run_session(log, arrived_at)


async def _nothing(*_: Any) -> None:
    """Instead of something."""


async def _yes(*_: Any) -> bool:
    return True


async def _revise_uncounted(self: RequestValidator, *asked: Any) -> tuple[ResolvedRequest, tuple[int, ...]]:
    plan, edit = await _REVISE(self, *asked)
    return replace(plan, revision=0), edit


def _give_up(self: FaultIsolation, step: list[ScheduledSequence], *, failed: bool) -> list[StepOutcome]:
    return [Internal("the step failed") for _ in step]


def _keep_all(self: KVCache, sequence: KVSequence, length: int) -> None:
    """Does not roll back."""


_FOLLOW, _REVISE, _OPEN = OutputStream.follow, RequestValidator.revise, SessionRun._open_request
HONEST = "a stream resumes at an offset"
EDITED = Size(errands={"edit": 1.0})
ROLLING = Size(texts=4, errands={"listen": 1.0}, relaxed=1.0, gentle=True)
"""Rolling restarts, which no client may notice."""

TWO = Size(verifiers=3, arithmetics=2, errands={"listen": 0.7, "leave": 0.1, "edit": 0.2})
"""Verifiers of two arithmetics, one of which takes the other's place now and then."""


def _anywhere(self: SessionRun, verifier: VerifierWorker) -> verifier_pb2.DecodeOpen:
    request = _OPEN(self, verifier)
    request.arithmetic = ""
    return request


RULES: dict[str, list[Callable[[ExitStack], Any]]] = {
    "the store fences": [_without(MemoryStore, "_check", lambda *_: None)],
    "first logged, then shown": [_without(SessionRun, "_commit_and_show", _show_first)],
    "rounds are dropped by epoch and base": [_without(VerifierSession, "receive_round", _ungated)],
    "a client takes what follows what it has": [_without(Completion, "_extend", _believe)],
    HONEST: [
        _without(Completion, "_extend", _believe),
        _without(OutputStream, "follow", lambda self, *_, **__: _FOLLOW(self)),
    ],
    "a stream's end ends its sessions": [_without(GatewayStream, "close", lambda self: None)],
    "candidates are checked": [_without(flow_control, "check", lambda frame, vocabulary_size, limits: frame)],
    "a record counts its rollbacks": [_without(RequestValidator, "revise", _revise_uncounted)],
    "a stale text is not resumed": [_without(SessionRegistry, "_is_current", _yes)],
    "an owner that is fenced off follows the log": [_without(SessionEntry, "run_new_session", _run_only)],
    "a cancel is written down": [_without(SessionOwnership, "finish_cancelled", _nothing)],
    "what was shown is written before a takeover": [_without(SessionOwnership, "flush_writes", _nothing)],
    "a gateway that ends writes what is left": [_without(parties, "flush", _nothing)],
    "a failed step is run again in parts": [_without(FaultIsolation, "_run_apart", _give_up)],
    "what a failed pass kept is rolled back": [_without(KVCache, "rollback", _keep_all)],
    "sessions may finish before a worker ends": [_without(parties, "GRACE_S", 0.0)],
    "a text goes on with its own arithmetic": [_without(VerifierSearch, "_may_mix", True)],
    "a new owner reads the arithmetic": [_without(run, "wanted", lambda spans: "")],
    "a verifier that took another's address is asked, and refuses": [
        _without(WorkerWatch, "doubt", lambda self: None),
        _without(SessionRun, "_open_request", _anywhere),
    ],
    "a mixture is marked": [_without(run, "opened", lambda spans, length, arithmetic: spans)],
}

WORLDS: dict[str, tuple[Storm, Size, int]] = {
    "the store fences": (storm, Size(), 16),
    "a stream's end ends its sessions": (storm, Size(), 44),
    "candidates are checked": (storm, Size(), 17),
    "what a failed pass kept is rolled back": (storm, Size(), 45),
    HONEST: (honest_storm, Size(), 0),  # where every stream keeps gRPC's promise
    "a record counts its rollbacks": (storm, EDITED, 22),
    "a stale text is not resumed": (storm, EDITED, 23),
    "an owner that is fenced off follows the log": (storm, replace(EDITED, relaxed=0.0), 65),
    "a cancel is written down": (storm, Size(errands={"cancel": 1.0}), 0),
    "what was shown is written before a takeover": (storm, replace(EDITED, relaxed=1.0), 0),
    "a gateway that ends writes what is left": (restarts, ROLLING, 1),
    "sessions may finish before a worker ends": (restarts, ROLLING, 0),
    "a text goes on with its own arithmetic": (storm, TWO, 0),
    "a new owner reads the arithmetic": (storm, TWO, 0),
    "a verifier that took another's address is asked, and refuses": (storm, TWO, 573),
    "a mixture is marked": (storm, TWO, 3),
}
"""Where a rule is missed, and from which seed on it is soon; any other one anywhere."""


def worlds(rule: str) -> tuple[Storm, Size, int]:
    return WORLDS.get(rule, (storm, Size(), 0))


@contextmanager
def switched_off(rule: str) -> Iterator[None]:
    with ExitStack() as stack:
        for switch in RULES[rule]:
            switch(stack)
        yield
