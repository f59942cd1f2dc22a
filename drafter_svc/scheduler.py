"""The drafting loop: keep every session's tree ahead of its verifier, many sessions in each forward pass."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from drafter_svc.proposers import Answer, DraftRequest, Proposer
from drafter_svc.send_policy import join, tell
from drafter_svc.session import DraftSession
from drafter_svc.step_stats import StepStats
from drafter_svc.tree import DraftNode
from slipstream.engine.model_thread import ModelThread
from slipstream.errors import Internal, SlipstreamError

log = logging.getLogger(__name__)

ROUND = 16
"""Committed tokens to read that are a round's at most; more are a prompt."""
PROMPTS = 4
"""One of so many tokens of a pass is kept for prompts, while there are any."""
PASS_NODES = 64
"""Nodes of all sessions together that are guessed on in one pass, at least one of each. Where more compete, the next
pass comes sooner instead: depth is worth more than breadth, and what is not guessed on now may be then.
"""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """Whom a session's guesses go to. Plain functions: the loop waits for nobody."""

    session: DraftSession
    candidates: Callable[[list[DraftNode]], None]
    """Nodes to be told, numbered without a gap."""
    failed: Callable[[SlipstreamError], None]


class DraftScheduler:
    """`run` drafts until cancelled. `step_tokens` bounds one pass, `expand` the nodes of a session guessed on in it."""

    def __init__(
        self,
        proposer: Proposer,
        thread: ModelThread,
        step_tokens: int,
        expand: int = 4,
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
        self.steps = 0
        self.tally = StepStats()

    def __len__(self) -> int:
        return len(self._subscribers)

    def add(self, subscriber: Subscriber) -> None:
        self._subscribers[subscriber.session] = subscriber
        self.wake()

    def remove(self, session: DraftSession) -> None:
        session.closed = True
        if session.trace is not None:
            session.trace.end()
        if self._subscribers.pop(session, None) is not None:
            self._closing.append(session)
            self.wake()

    def changed(self, session: DraftSession) -> None:
        """The session's root moved, or its policy did: what is worth telling now may have been guessed already."""
        self._tell(session, idle=True)
        self.wake()

    def wake(self) -> None:
        """A session changed: there may be something to draft."""
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            turns = self._turns()
            closing, self._closing = self._closing, []
            if not turns and not closing:
                self._work.clear()
                continue
            began, step = self._clock(), self._thread.run(self._step, turns, closing)
            if turns:
                self.tally.began(turns)  # while the model is busy
            answers = await step
            if turns:
                self.tally.ended(self._clock() - began)
            self.steps += 1
            for turn, answer in zip(turns, answers, strict=True):
                if turn.session.trace is not None and not isinstance(answer, SlipstreamError):
                    turn.session.trace.passed(began, self._clock(), len(answer))
                self._deliver(turn, answer)

    def _turns(self) -> list[DraftRequest]:
        """The sessions of the next step: those that decode, the fewest guesses ahead first, then those whose prompt is
        being read, each with an equal share of what is left."""
        turns: list[DraftRequest] = []
        frontiers = self._frontiers()
        reading = sum(session.pending > ROUND for session, starts in frontiers if starts)
        kept = self._step_tokens // PROMPTS if reading else 0
        room = self._step_tokens - kept
        for session, starts in frontiers:
            if session.pending > ROUND:
                room, kept = room + kept, 0
            share = min(room, max(ROUND, room // max(reading, 1))) if session.pending > ROUND else room
            turn = self._turn(session, starts, share) if starts and room > 0 else None
            if turn is not None:
                turns.append(turn)
                room -= len(turn.pending) + len(turn.nodes)
                reading -= session.pending > ROUND
            elif session.held_since is not None:
                self._tell(session, idle=room > 0)
        return turns

    def _frontiers(self) -> list[tuple[DraftSession, list[DraftNode]]]:
        """Of each session the nodes to guess on from: its likeliest, and of the others the likeliest of all sessions.
        Those under ratio rules do not compete: how much is guessed must not depend on what was drawn."""
        sessions = sorted(self._subscribers, key=lambda session: (session.pending > ROUND, session.tree.node_count))
        frontiers = [session.frontier(self._expand) for session in sessions]
        competing = [session.sampling.coupled for session in sessions]
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

    def _turn(self, session: DraftSession, starts: list[DraftNode], room: int) -> DraftRequest | None:
        """What the session brings, with at most `room` committed tokens; None when nothing is asked of it."""
        while len(nodes := session.tree.above(starts)) > session.policy.max_nodes:  # there is KV for so many
            starts.pop()
        if not starts:
            return None
        start, end = session.computed, len(session.tokens)
        stop = min(end, start + room)
        pending = session.tokens[start:stop]
        if stop < end:
            session.computed = stop
            return DraftRequest(session, session.revision, start, pending, [], [], [], [], [])
        # True once the step has ended, and no other step begins before. The last token is computed with each tree.
        session.computed = end - 1
        for node in starts:
            node.expanded = True
        index = {id(node): number for number, node in enumerate(nodes)}
        parents = [index.get(id(node.parent), -1) for node in nodes]
        expand = [index.get(id(node), -1) for node in starts]
        return DraftRequest(
            session, session.revision, start, pending, nodes, [n.token for n in nodes], parents, expand, starts
        )

    def _step(self, turns: list[DraftRequest], closing: list[DraftSession]) -> list[Answer]:
        """On the model's thread."""
        for session in closing:
            self._proposer.close(session)
        try:
            return self._proposer.grow(turns) if turns else []
        except Exception as error:
            log.error("a drafting step failed", exc_info=error)
            return [Internal("the drafter failed; open the session again.") for _ in turns]

    def _deliver(self, turn: DraftRequest, answer: Answer) -> None:
        session = turn.session
        subscriber = self._subscribers.get(session)
        if subscriber is None:
            return
        if isinstance(answer, SlipstreamError):
            self.remove(session)
            subscriber.failed(answer)
        elif turn.revision == session.revision:
            self.tally.guessed += len(answer)
            join(session, answer)
            self._tell(session)

    def _tell(self, session: DraftSession, *, idle: bool = False) -> None:
        subscriber = self._subscribers.get(session)
        if subscriber is not None and (nodes := tell(session, self._clock(), idle=idle)):
            self.tally.told += len(nodes)
            subscriber.candidates(nodes)
