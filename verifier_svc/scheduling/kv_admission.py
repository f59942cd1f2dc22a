"""Who has KV: sessions enter when what they have fits, grow step by step, and make room for those before them.

Nothing is reserved for what a session may need one day, so many more run than their longest texts would have room for.
Sessions are served in order of `rank`: priority first, then arrival.

- **Enter**: the first of those without KV enters when there is room for all its tokens, which it takes at once, and
  for one more block of each session that is inside, which will grow. As long as it does not fit, nobody behind it does
  either: short prompts do not starve a long one. For a higher priority, those of a lower one make room.
- **Fit**: a step's blocks are taken in order. Whoever finds too few goes without candidates; if that does not help,
  the last of those behind it gives up its KV, and waits to enter again. What it had is computed anew then, or found,
  for released blocks are kept while nobody needs them.
- Sessions that cannot run (their client does not read) give theirs up before all others.

So the first of those inside always goes on, for the pool holds the longest session that admission lets in, and nobody
is lost.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slipstream.engine.engine import Engine
from slipstream.engine.kvcache.sequence import Sequence as KV
from slipstream.speculation.selection import Selection
from verifier_svc.execution.embedded import ScheduledSequence
from verifier_svc.session import Rank, Session


class KVAdmission:
    """Owned by the event loop. It keeps the engine's books, which belongs to nobody else between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside: dict[Session, None] = {}
        self._waiting: dict[Session, None] = {}
        self._queue: list[tuple[Rank, Session]] = []
        """A heap of those that wait, and of some that did."""
        self._resting: dict[Session, None] = {}
        """Without KV, and not runnable."""
        self._refusal: _Refusal | None = None
        self.preemptions = 0
        """How often a session gave up its KV before it ended."""
        self.tokens_sought = self.tokens_found = 0
        """Tokens of sessions that entered for the first time, and those of them whose KV was there already."""

    @property
    def waiting(self) -> int:
        """Sessions without KV."""
        return len(self._waiting) + len(self._resting)

    def add(self, session: Session) -> None:
        self._waiting[session] = None
        heapq.heappush(self._queue, (session.rank, session))

    def remove(self, session: Session) -> None:
        """The session is over; no step is running."""
        if session.sequence is not None:
            self._engine.close(session.sequence)
            session.sequence = None
        for place in (self._inside, self._waiting, self._resting):
            place.pop(session, None)
        if len(self._queue) > 2 * len(self._waiting) + 64:  # those who left it by the side
            self._queue = [(waiting.rank, waiting) for waiting in self._waiting]
            heapq.heapify(self._queue)

    def enter(self) -> Collection[Session]:
        """The sessions that have KV, after all have entered that fit."""
        for session in [session for session in self._resting if session.runnable]:
            del self._resting[session]
            self.add(session)
        while self._queue:
            rank, session = heapq.heappop(self._queue)
            if session not in self._waiting:
                continue
            if not session.runnable:
                self._resting[session] = None
            elif not self._enter(session):
                heapq.heappush(self._queue, (rank, session))
                break
            del self._waiting[session]
        return self._inside.keys()

    def fit(self, turns: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Those of the turns that there is KV for, some without candidates; it is taken. All of them is `turns` itself.
        None of them leaves the last of all sessions without its KV, so that there is more the next time."""
        missing = 0
        for turn in turns:
            self._engine.rollback(_held(turn.session), turn.computed)
            missing += self._missing(turn)
        if missing <= self._engine.blocks_free:
            for turn in turns:
                self._grow(turn)
            return turns
        fitted: list[ScheduledSequence] = []
        victims = self._victims()
        for turn in sorted(turns, key=lambda turn: turn.session.rank):
            if turn.session.sequence is not None and (fit := self._fit(turn, victims)) is not None:
                fitted.append(fit)
        if not fitted:
            self._preempt(max(self._inside, key=lambda session: session.rank))
        return fitted

    def _enter(self, session: Session) -> bool:
        victims = self._victims((session.priority, sys.maxsize))
        refusal = _Refusal(session, len(session.tokens), len(self._inside), len(victims), self._engine.blocks_free)
        if self._refusal is not None and refusal.follows(self._refusal):
            return False
        sequence = self._engine.begin(session.tokens, session.cache_salt)
        pending = len(session.tokens) - sequence.length
        leaving = self._enough(self._engine.missing(sequence, pending), victims)
        if leaving is None:
            self._engine.close(sequence)
            self._refusal = refusal
            return False
        for victim in leaving:
            self._preempt(victim)
        self._engine.grow(sequence, pending)
        session.sequence, session.computed = sequence, sequence.length
        self._inside[session] = None
        if not session.entered:
            session.entered = True
            self.tokens_sought += len(session.tokens) - 1
            self.tokens_found += sequence.length
        return True

    def _enough(self, missing: int, victims: Sequence[Session]) -> Sequence[Session] | None:
        """How many of the victims, first ones first, must leave for one that misses so many blocks to enter. None where
        all are too few: then nobody leaves."""
        inside, free = len(self._inside), self._engine.blocks_free
        for count in range(len(victims) + 1):
            if not inside or missing + inside <= free:
                return victims[:count]
            if count < len(victims):
                free += self._engine.owned(_held(victims[count]))
                inside -= 1
        return None

    def _fit(self, turn: ScheduledSequence, victims: list[Session]) -> ScheduledSequence | None:
        """The turn with or without its candidates, or nothing, where nobody behind it has anything to give up."""
        plain = turn._replace(selection=Selection())
        while True:
            for offer in (turn, plain):
                if self._missing(offer) <= self._engine.blocks_free:
                    self._grow(offer)
                    return offer
            if not victims or (victims[0].runnable and victims[0].rank <= turn.session.rank):
                return None
            self._preempt(victims.pop(0))

    def _victims(self, rank: Rank | None = None) -> list[Session]:
        """Who gives up its KV, first ones first: those that cannot run, then the last in order; behind `rank` alone if
        there is one."""
        idle = sorted((each for each in self._inside if not each.runnable), key=lambda each: each.idle_since)
        running = (each for each in self._inside if each.runnable and (rank is None or each.rank > rank))
        return [*idle, *sorted(running, key=lambda each: each.rank, reverse=True)]

    def _preempt(self, session: Session) -> None:
        self._engine.close(_held(session))
        session.sequence, session.computed = None, 0
        del self._inside[session]
        self.add(session)
        self.preemptions += 1

    def _missing(self, turn: ScheduledSequence) -> int:
        return self._engine.missing(_held(turn.session), turn.tokens)

    def _grow(self, turn: ScheduledSequence) -> None:
        self._engine.grow(_held(turn.session), turn.tokens)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Who did not fit, and into what."""

    session: Session
    tokens: int
    inside: int
    victims: int
    free: int

    def follows(self, last: _Refusal) -> bool:
        """Whether nothing got better since that one."""
        same = (last.session, last.tokens, last.inside, last.victims)
        return (self.session, self.tokens, self.inside, self.victims) == same and self.free <= last.free


def _held(session: Session) -> KV:
    assert session.sequence is not None
    return session.sequence
