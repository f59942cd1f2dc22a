"""The verifiers and drafters of a cell: the workers' own code below models without a text, and sessions as their client
sees them."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from capacity.clock import VirtualThread
from capacity.emulation import DrawingExecutor, GuessingProposer, IdealDrafts, model_of
from capacity.settings import Acceptance, DraftSettings, Verifying
from capacity.workers import Drafter, VirtualVerifierParts, connect, curve_of, start_drafter, start_verifier
from slipstream.proposers.base import OpenedProposer
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.proposers.registry import IN_VERIFIER, find_method
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.service import GatewayStream, VerifierService
from verifier_svc.sources.local import LocalSource
from verifier_svc.sources.source import SourceContext

DRAFT_MODEL = "model"
"""The drafting method of every drafter."""
AHEAD = 16
"""Candidates that an ideal engine keeps for each that a step may take: it sends none over a network."""


@dataclass(slots=True, eq=False)
class SimulatedSession:
    """As its client sees it. Seconds of the cell's time."""

    arrived: float
    prompt: int
    output: int
    observed: bool = True
    """False for one whose beginning was not seen."""
    drafter: int | None = None
    tokens: int = 0
    """Output so far."""
    rounds: int = 0
    first: float = math.nan
    """When the first token came."""
    ended: float = math.nan

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrived

    @property
    def tpot_s(self) -> float:
        """Seconds of each token after the first one; NaN where there is one only."""
        return (self.ended - self.first) / (self.output - 1) if self.output > 1 else math.nan


class SessionListener(Protocol):
    def ended(self, session: SimulatedSession) -> None: ...

    def refused(self, failure: types_pb2.Failure) -> None:
        """A verifier cannot serve a session."""


class SimulatedVerifier:
    """One verifier of a cell, and its gateway's stream."""

    def __init__(self, listener: SessionListener, settings: Verifying, draws: random.Random) -> None:
        self.placed = 0
        """Sessions that are there, wait, or are on their way."""
        self._listener, self._settings = listener, settings
        self._waiting: deque[SimulatedSession] = deque()
        self._open = self._count = 0
        thread = VirtualThread()
        ideal = None if settings.draft is None else IdealDrafts(settings, settings.draft)
        self.executor = DrawingExecutor(settings, thread.sleep, draws, ideal)
        limits = StepLimits(
            settings.step_tokens, settings.prefill_tokens, settings.max_wait_s, prompt_step_s=settings.prompt_step_s
        )
        self.worker = start_verifier(self.executor, curve_of(settings.cost), thread, VirtualVerifierParts(limits))
        if ideal is not None:
            self.worker.sources.add_local(_BesideTarget(settings, ideal, self.worker.sources.context))
        self._stream = _ClientStream(self.worker.service, self)

    @property
    def max_draft_tokens(self) -> int:
        return self._settings.max_draft_tokens

    @property
    def full(self) -> bool:
        return bool(self._waiting or self.worker.scheduler.kv_admission.refused)

    def connect(self, drafters: Sequence[Drafter], delay_s: float) -> None:
        """Its sessions name these by their numbers."""
        for number, drafter in enumerate(drafters):
            connect(self.worker.sources, drafter, f"drafter:{number}", delay_s)

    def add(self, session: SimulatedSession) -> None:
        self._waiting.append(session)
        self._enter()

    def ended(self, session: SimulatedSession) -> None:
        self.placed -= 1
        self._open -= 1
        self._listener.ended(session)
        self._enter()

    def refused(self, failure: types_pb2.Failure) -> None:
        self._listener.refused(failure)

    def _enter(self) -> None:
        while self._waiting and self._open < self._settings.sessions:
            session = self._waiting.popleft()
            self._open += 1
            self._count += 1
            self._stream.open(self._count, session, self._sources(session))

    def _sources(self, session: SimulatedSession) -> list[str]:
        if self._settings.draft is not None:
            return [IN_VERIFIER + DRAFT_MODEL]
        return [] if session.drafter is None else [f"drafter:{session.drafter}"]


class _ClientStream(GatewayStream):
    """Messages on it arrive at once."""

    def __init__(self, service: VerifierService, verifier: SimulatedVerifier) -> None:
        super().__init__(service)
        self._verifier = verifier
        self._clients: dict[int, SimulatedSession] = {}
        self._loop = asyncio.get_running_loop()

    def open(self, number: int, session: SimulatedSession, sources: list[str]) -> None:
        self._clients[number] = session
        most = self._verifier.max_draft_tokens
        request = verifier_pb2.DecodeOpen(
            key=types_pb2.SessionKey(id=f"{number}", epoch=1),
            prefix=types_pb2.Prefix(token_ids=bytes(session.prompt), prompt_length=session.prompt),
            sampling=types_pb2.SamplingOptions(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
            max_length=session.prompt + session.output,
            policy=verifier_pb2.DecodePolicy(max_draft_tokens=most if sources else 0),
            drafters=[verifier_pb2.DrafterAddress(address=each, name=DRAFT_MODEL) for each in sources],
            cache_salt=f"{number}",  # no two prompts are alike
        )
        command = verifier_pb2.DecodeCommand(session=number, epoch=1, open=request)
        self.receive(verifier_pb2.DecodeRequest(commands=[command]))

    def send(self, reply: verifier_pb2.Round | verifier_pb2.DrafterEvent) -> None:
        if isinstance(reply, verifier_pb2.Round):
            session = self._clients[reply.session]
            if not session.tokens:
                session.first = self._loop.time()
            session.tokens += len(reply.token_ids)
            session.rounds += 1

    def _put(self, reply: Any) -> None:
        """The end of a session. The service is not called from within itself."""
        session = self._clients.pop(reply.session)
        if reply.HasField("failure"):
            self._loop.call_soon(self._verifier.refused, reply.failure)
        else:
            self._loop.call_soon(self._verifier.ended, session)


class _BesideTarget(LocalSource):
    """Drafts right before a step is planned, for as long as is ideal; the executor counts what that takes."""

    def __init__(self, settings: Verifying, ideal: IdealDrafts, context: SourceContext) -> None:
        assert settings.draft is not None
        drafting = DraftSettings(settings.draft)
        proposer = GuessingProposer(settings.acceptance, drafting, lambda seconds: None)
        opened = OpenedProposer(model_of(settings.acceptance), proposer)
        super().__init__(find_method(DRAFT_MODEL), opened, context, None, None, settings.expand)
        self._ahead = AHEAD
        self._ideal = ideal

    def collect(self) -> None:
        self._drafting.step_each(self._ideal.passes(len(self._drafting)))


def simulated_drafter(settings: DraftSettings, acceptance: Acceptance) -> Drafter:
    thread = VirtualThread()
    proposer = GuessingProposer(acceptance, settings, thread.sleep)
    limits = DraftStepLimits(settings.step_tokens, settings.expand)
    return start_drafter(proposer, model_of(acceptance), limits, settings.max_nodes, thread)
