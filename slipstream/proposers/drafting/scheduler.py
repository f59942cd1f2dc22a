"""The drafting loop: one process's `DraftScheduler` keeps every session's candidate tree ahead of its verifier.

Each step asks one `Proposer`, on the model's own thread, for nodes of many sessions; what comes back joins their trees,
and each session decides what is sent. The loop never waits for a verifier, and no verifier waits for it.
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
from slipstream.proposers.base import Proposal, Proposer, ProposerContext
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.session import DraftSession
from slipstream.proposers.expansion import FEWEST
from slipstream.proposers.level_budget import LevelBudget

log = logging.getLogger(__name__)

ROUND = 16
"""Most unread committed tokens of a round; more are a prompt."""
PROMPTS = 4
"""The inverse share of a step's tokens that is kept for prompts, while there are any."""
PASS_NODES = 64
"""Most nodes of all sessions together that are expanded in one step, at least one of each session. Where more compete,
the next step comes sooner instead: depth is worth more than breadth, and what is not expanded now may be then.
"""
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


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One session's part of one step."""

    session: DraftSession
    context: ProposerContext
    places: list[DraftNode]
    """The root, then the context's nodes: what the proposal's parent indices stand for."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes for it, as far as is known."""
        unread = self.context.length - self.session.computed
        deeper = self.context.deeper
        below = deeper.levels * deeper.expand if deeper is not None else 0
        return min(unread, self.context.max_read_tokens) + len(self.context.node_tokens) + below


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
    """`run` drafts until cancelled. `step_tokens` bounds one step, `expand` the nodes of a session expanded in it."""

    def __init__(
        self,
        proposer: Proposer,
        thread: ModelThread,
        step_tokens: int,
        expand: int = FEWEST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = proposer
        self._thread = thread
        self._step_tokens = step_tokens
        self._expand = expand
        self._clock = clock
        self._subscribers: dict[DraftSession, Subscriber] = {}
        self._closing: list[DraftSession] = []
        self._work = asyncio.Event()
        self._changes = 0
        self._level_budget = LevelBudget(CALL_S)
        self.steps = 0
        self.observer = DraftStepObserver()

    def __len__(self) -> int:
        return len(self._subscribers)

    def add_session(self, subscriber: Subscriber) -> None:
        self._subscribers[subscriber.session] = subscriber
        self.wake()

    def remove_session(self, session: DraftSession) -> None:
        session.observer.drafting_ended()
        if self._subscribers.pop(session, None) is not None:
            self._closing.append(session)
            self.wake()

    def session_changed(self, session: DraftSession) -> None:
        """After a new root or policy, nodes that are there already may be worth sending."""
        self._send(session, idle=True)
        self.wake()

    def wake(self) -> None:
        """Called after any session changed: there may be something to draft, or room for a session without."""
        self._changes += 1
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            requests = self._schedule_step()
            closing, self._closing = self._closing, []
            if not requests and not closing:
                self._work.clear()
                continue
            changes, began = self._changes, self._clock()
            step = self._thread.run(self._run_step, requests, closing)
            if requests:
                self.observer.step_began(requests)  # while the model is busy
            answers = await step
            if all(request.context.expand for request in requests):
                self._level_budget.observe(self._clock() - began, answers)
            if requests:
                self.observer.step_ended(self._clock() - began)
            self.steps += 1
            for request, answer in zip(requests, answers, strict=True):
                if isinstance(answer, Proposal):
                    request.session.observer.nodes_proposed(began, self._clock(), len(answer.nodes))
                self._deliver(request, answer, changes)

    def _schedule_step(self) -> list[DraftRequest]:
        """The next step: sessions that decode, the smallest tree first, then those whose prompt is being read, with
        equal shares of what is left."""
        requests: list[DraftRequest] = []
        frontiers = self._frontiers()
        reading = sum(session.pending > ROUND for session, starts in frontiers if starts)
        kept = self._step_tokens // PROMPTS if reading else 0
        room = self._step_tokens - kept
        for session, starts in frontiers:
            is_prompt = session.pending > ROUND
            if is_prompt:
                room, kept = room + kept, 0
            share = min(room, max(ROUND, room // max(reading, 1))) if is_prompt else room
            request = self._request(session, starts, share) if starts and room > 0 else None
            if request is not None:
                requests.append(request)
                room -= request.tokens
                reading -= is_prompt
            elif session.held_since is not None:
                self._send(session, idle=room > 0)
        return requests

    def _frontiers(self) -> list[tuple[DraftSession, list[DraftNode]]]:
        """For each session the nodes to expand: its likeliest one, and of the others the likeliest of all sessions.
        Those under the ratio rule do not compete: how much is proposed must not depend on what was drawn."""
        sessions = [session for session in self._subscribers if session.no_room_at != self._changes]
        sessions.sort(key=lambda session: (session.pending > ROUND, session.tree.node_count))
        frontiers = [session.frontier(self._expand) for session in sessions]
        competing = [not session.sampling.drawn for session in sessions]
        others = [
            (session.tree.root.path_log_prob - node.path_log_prob, number)
            for number, (session, starts) in enumerate(zip(sessions, frontiers, strict=True))
            if competing[number]
            for node in starts[1:]
        ]
        room = max(0, PASS_NODES - sum(map(len, frontiers)) + len(others))
        if len(others) > room:
            counts = Counter(number for _, number in sorted(others)[:room])
            frontiers = [
                starts[: 1 + counts[number]] if competing[number] else starts for number, starts in enumerate(frontiers)
            ]
        return list(zip(sessions, frontiers, strict=True))

    def _request(self, session: DraftSession, starts: list[DraftNode], room: int) -> DraftRequest | None:
        """The session's part, which reads at most `room` committed tokens; None when there is nothing to expand."""
        while len(nodes := session.tree.above(starts)) > session.policy.max_nodes:
            starts.pop()
        if not starts:
            return None
        if session.pending > room:
            return DraftRequest(session, session.context([], [], room), [])
        for node in starts:
            node.expanded = True
        # A proposer that closed the sequence for others has to read it again: as a prompt, not at once.
        count = min(self._expand, max(1, PASS_NODES // len(self._subscribers)))
        deeper = session.deeper(starts, count, self._level_budget.levels)
        context = session.context(nodes, starts, max(session.pending, ROUND), deeper)
        return DraftRequest(session, context, [session.tree.root, *nodes])

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

    def _deliver(self, request: DraftRequest, answer: Proposal | SlipstreamError, changes: int = 0) -> None:
        """`changes`: their number when the step began; a session without room waits for another one."""
        session = request.session
        subscriber = self._subscribers.get(session)
        if subscriber is None:
            return
        if isinstance(answer, SlipstreamError):
            self.remove_session(session)
            subscriber.fail(answer)
        elif request.context.tokens is session.tokens:  # else it stands on a prefix that was replaced
            session.computed = min(answer.read_tokens, request.context.length - 1)
            session.no_room_at = changes if answer.no_room else -1
            if answer.read_tokens < request.context.length:
                for node in request.context.expand:
                    session.tree.reopen(request.places[1 + node])
            self.observer.nodes_proposed(len(answer.nodes))
            session.join(request.places, answer.nodes)
            self._send(session, idle=answer.no_room)

    def _send(self, session: DraftSession, *, idle: bool = False) -> None:
        subscriber = self._subscribers.get(session)
        if subscriber is not None and (nodes := session.take_nodes_to_send(self._clock(), idle=idle)):
            self.observer.nodes_sent(len(nodes))
            subscriber.send_nodes(nodes)
