"""The drafting loop: one `DraftScheduler` keeps the candidate trees of its sessions ahead of their verifiers.

Each step asks one `Proposer`, on the model's own thread, for nodes of many sessions; what comes back joins their trees,
and each session decides what is sent. The loop never waits for a verifier, and no verifier waits for it. A drafter
sends over gRPC, a verifier that drafts itself grafts at once: each is a `Subscriber` of its sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.engine.model_thread import ModelThread
from slipstream.errors import Internal, SlipstreamError
from slipstream.proposers.base import Proposal, Proposer
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.session import DraftSession
from slipstream.proposers.drafting.shares import DraftShares
from slipstream.proposers.drafting.step import ROUND, DraftRequest, DraftStepLimits, plan_alone, plan_step
from slipstream.proposers.level_budget import LevelBudget

log = logging.getLogger(__name__)

CALL_S = 0.003
"""Seconds that a call of several levels may take. With 4 ms a drafter of 2 ms a pass hands over every other level only,
and `benchmarks.virtual` prints 142 tokens a second at 0 ms instead of 151."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """Receives a session's nodes. Plain functions, called on the event loop: they must not block."""

    session: DraftSession
    send_nodes: Callable[[list[DraftNode]], None]
    """Takes nodes to send, numbered without a gap."""
    fail: Callable[[SlipstreamError], None]


class DraftStepObserver:
    """Watches the loop; does nothing by itself."""

    def step_began(self, requests: Sequence[DraftRequest]) -> None:
        """Called while the proposer works on them."""

    def step_ended(self, seconds: float) -> None:
        """Called after each `step_began`."""

    def nodes_proposed(self, count: int) -> None:
        """Called for each session whose tree the nodes join."""

    def nodes_sent(self, count: int) -> None:
        """Called for each session whose verifier the nodes are sent to."""


class DraftScheduler:
    """`run` drafts on the model's thread until cancelled; `step_each` drafts at once, on the caller's."""

    def __init__(
        self,
        proposer: Proposer,
        limits: DraftStepLimits,
        clock: Callable[[], float] = time.monotonic,
        call_s: float = CALL_S,
    ) -> None:
        """`call_s`: seconds that a call of several levels may take."""
        self._proposer = proposer
        self._limits = limits
        self._clock = clock
        self._subscribers: dict[DraftSession, Subscriber] = {}
        self._pending: dict[DraftSession, None] = {}
        """Sessions whose trees may have to grow, or that hold nodes back."""
        self._without_room: dict[DraftSession, None] = {}
        """Sessions that the proposer has no room for until something changes."""
        self._closing: list[DraftSession] = []
        self._work = asyncio.Event()
        self._changed = False
        """Whether anything changed since the last step was planned."""
        self._level_budget = LevelBudget(call_s)
        self._tenants = Counter[str]()
        """Sessions of each."""
        self._shares = DraftShares()
        self.steps = 0
        self.observer = DraftStepObserver()

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def level_s(self) -> float:
        """Seconds of a level of nodes lately; 0 before any was timed."""
        return self._level_budget.level_s

    def sessions_of(self, tenant: str) -> int:
        return self._tenants[tenant]

    def add_session(self, subscriber: Subscriber) -> None:
        self._subscribers[subscriber.session] = subscriber
        self._tenants[subscriber.session.tenant] += 1
        self._wake(subscriber.session)

    def remove_session(self, session: DraftSession) -> None:
        if self._subscribers.pop(session, None) is not None:
            self._tenants -= Counter({session.tenant: 1})
            session.observer.drafting_ended()
            self._closing.append(session)
            self._wake()
        self._pending.pop(session, None)
        self._without_room.pop(session, None)

    def session_changed(self, session: DraftSession) -> None:
        """After a new root or policy, nodes that are there already may be worth sending, and others worth drafting."""
        self._send(session, idle=True)
        if session in self._subscribers:  # what was sent may have ended it
            self._wake(session)

    def _wake(self, *sessions: DraftSession) -> None:
        """There may be something to draft for these, and room for others without."""
        if self._without_room:
            self._pending |= self._without_room
            self._without_room = {}
        for session in sessions:
            self._pending[session] = None
        self._changed = True
        self._work.set()

    async def run(self, thread: ModelThread) -> None:
        while True:
            await self._work.wait()
            requests, closing = self._schedule_step(), self._take_closing()
            if not requests and not closing:
                self._work.clear()
                continue
            began = self._clock()
            step = thread.run(self._run_step, requests, closing)
            if requests:
                self.observer.step_began(requests)  # while the model is busy
            answers = await step
            if requests:
                self.observer.step_ended(self._clock() - began)
            self._finish(requests, answers, began)

    def step_each(self, most: int) -> None:
        """Takes up to `most` steps for each session that has something to draft, with no other one in them: what is
        raised costs one session its drafting."""
        if self._closing:
            self._run_step([], self._take_closing())
        waiting = list(self._pending)
        if not waiting:
            return
        share = max(ROUND, self._limits.prompt_tokens // len(waiting))
        limits = DraftStepLimits(share, self._limits.expand_each(len(waiting)))
        for session in waiting:
            for _ in range(most):
                if session not in self._pending:
                    break
                self._changed = False
                request = plan_alone(session, limits, self._level_budget.levels)
                if request is None:
                    self._rest(session)
                    break
                session.in_step, began = True, self._clock()
                answers = self._run_step([request], [])
                if request.context.expand:
                    self._level_budget.observe(self._clock() - began, answers)
                self.steps += 1
                self._deliver(request, answers[0], began)

    def _schedule_step(self) -> list[DraftRequest]:
        self._changed = False
        plan = plan_step(self._pending, self._limits, self._level_budget.levels, self._tenants, self._shares)
        for session in plan.resting:
            self._rest(session)
        for session in plan.waiting:
            if session.held_since is not None:
                self._send(session)
        for request in plan.requests:
            request.session.in_step = True
        return plan.requests

    def _rest(self, session: DraftSession) -> None:
        """The session has nothing to expand until something changes."""
        del self._pending[session]
        if session.held_since is not None:
            self._send(session, idle=True)

    def _take_closing(self) -> list[DraftSession]:
        closing, self._closing = self._closing, []
        return closing

    def _run_step(
        self, requests: list[DraftRequest], closing: list[DraftSession]
    ) -> Sequence[Proposal | SlipstreamError]:
        """Runs on the model's thread."""
        for session in closing:
            self._proposer.close_sequence(session)
        try:
            return self._proposer.propose([request.context for request in requests]) if requests else []
        except Exception as error:
            log.error("a drafting step failed", exc_info=error)
            return [Internal("the drafter failed; open the session again.") for _ in requests]

    def _finish(
        self, requests: list[DraftRequest], answers: Sequence[Proposal | SlipstreamError], began: float
    ) -> None:
        seconds = self._clock() - began
        if all(request.context.expand for request in requests):
            self._level_budget.observe(seconds, answers)
        levels = max((answer.levels for answer in answers if isinstance(answer, Proposal)), default=0)
        self._shares.cost.observe(max(1, levels), sum(request.tokens for request in requests), seconds)
        self.steps += 1
        for request, answer in zip(requests, answers, strict=True):
            self._deliver(request, answer, began)

    def _deliver(self, request: DraftRequest, answer: Proposal | SlipstreamError, began: float = 0.0) -> None:
        """`began`: seconds at which the step did."""
        session, ended = request.session, self._clock()
        session.in_step = False
        subscriber = self._subscribers.get(session)
        if subscriber is None:
            return
        if isinstance(answer, SlipstreamError):
            self.remove_session(session)
            subscriber.fail(answer)
            return
        session.computed = min(answer.read_tokens, request.context.length - 1)
        session.no_room = answer.no_room
        if answer.no_room and not self._changed:
            del self._pending[session]
            self._without_room[session] = None
        if answer.read_tokens < request.context.length:
            for node in request.context.expand:
                session.tree.reopen(request.places[1 + node])
        self.observer.nodes_proposed(len(answer.nodes))
        sent = session.tree.sent_count
        session.join(request.places, answer.nodes)
        self._send(session, idle=answer.no_room)
        session.observer.step_ended(began, ended, len(answer.nodes), session.tree.sent_count - sent)

    def _send(self, session: DraftSession, *, idle: bool = False) -> None:
        subscriber = self._subscribers.get(session)
        if subscriber is not None and (nodes := session.take_nodes_to_send(self._clock(), idle=idle)):
            self.observer.nodes_sent(len(nodes))
            subscriber.send_nodes(nodes)
