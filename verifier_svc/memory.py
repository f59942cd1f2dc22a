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

So the first in order always goes on, for the pool holds the longest session that admission lets in, and nobody is lost.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection
from dataclasses import replace

from slipstream.engine.engine import Engine
from slipstream.engine.sequence import Sequence
from slipstream.selection import Selection
from verifier_svc.session import Rank, Session
from verifier_svc.step import Turn


class Memory:
    """Owned by the event loop. It keeps the engine's books, which belongs to nobody else between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inside: dict[Session, None] = {}
        self._queue: list[tuple[Rank, Session]] = []
        self._resting: list[Session] = []
        """Without KV, and not runnable."""
        self._refused: tuple[Session, int] | None = None
        """Who did not fit into how many free blocks."""
        self.preemptions = 0
        """How often a session gave up its KV before it ended."""
        self.tokens_sought = self.tokens_found = 0
        """Tokens of sessions that entered, and those of them whose KV was there already."""

    @property
    def waiting(self) -> int:
        """Sessions without KV."""
        return sum(not session.closed for _, session in self._queue) + len(self._resting)

    def add(self, session: Session) -> None:
        heapq.heappush(self._queue, (session.rank, session))

    def remove(self, session: Session) -> None:
        """The session is over; no step is running."""
        if session.sequence is not None:
            self._engine.close(session.sequence)
            session.sequence = None
        self._inside.pop(session, None)
        if session in self._resting:
            self._resting.remove(session)

    def enter(self) -> Collection[Session]:
        """The sessions that have KV, after all have entered that fit."""
        for session in [session for session in self._resting if session.runnable]:
            self._resting.remove(session)
            self.add(session)
        while self._queue:
            session = heapq.heappop(self._queue)[1]
            if session.closed:
                continue
            if not session.runnable:
                self._resting.append(session)
            elif not self._enter(session):
                self.add(session)
                break
        return self._inside.keys()

    def fit(self, turns: list[Turn]) -> list[Turn]:
        """Those of the turns that there is KV for, some without candidates; it is taken. If there are none, those who
        have the KV are not in this step, and one of them has less now."""
        for turn in turns:
            self._engine.rollback(_sequence(turn), turn.computed)
        if sum(map(self._missing, turns)) <= self._engine.blocks_free:
            for turn in turns:
                self._grow(turn)
            return turns
        fitted: list[Turn] = []
        for turn in sorted(turns, key=lambda turn: turn.session.rank):
            if turn.session.sequence is not None and (fit := self._fit(turn)) is not None:
                fitted.append(fit)
        if not fitted:
            self._preempt(max(self._inside, key=lambda session: session.rank))
        return fitted

    def _enter(self, session: Session) -> bool:
        free = self._engine.blocks_free
        if self._refused == (session, free):
            return False
        sequence = self._engine.begin(session.tokens, session.cache_salt)
        pending = len(session.tokens) - sequence.length
        while self._inside and self._engine.missing(sequence, pending) + len(self._inside) > self._engine.blocks_free:
            victim = self._last((session.priority, sys.maxsize))
            if victim is None:
                self._engine.close(sequence)
                self._refused = session, free
                return False
            self._preempt(victim)
        self._engine.grow(sequence, pending)
        session.sequence, session.computed = sequence, sequence.length
        self._inside[session] = None
        self.tokens_sought += len(session.tokens) - 1
        self.tokens_found += sequence.length
        return True

    def _fit(self, turn: Turn) -> Turn | None:
        """The turn with or without its candidates, or nothing, where nobody behind it has anything to give up."""
        plain = replace(turn, selection=Selection())
        while True:
            for offer in (turn, plain):
                if self._missing(offer) <= self._engine.blocks_free:
                    self._grow(offer)
                    return offer
            victim = self._last(turn.session.rank)
            if victim is None:
                return None
            self._preempt(victim)

    def _last(self, rank: Rank) -> Session | None:
        """Who gives up its KV for somebody of this rank: one that cannot run, or the last one behind it."""
        idle = [session for session in self._inside if not session.runnable]
        if idle:
            return min(idle, key=lambda session: session.idle_since)
        last = max(self._inside, key=lambda session: session.rank, default=None)
        return last if last is not None and last.rank > rank else None

    def _preempt(self, session: Session) -> None:
        assert session.sequence is not None
        self._engine.close(session.sequence)
        session.sequence, session.computed = None, 0
        del self._inside[session]
        self.add(session)
        self.preemptions += 1

    def _missing(self, turn: Turn) -> int:
        return self._engine.missing(_sequence(turn), turn.tokens)

    def _grow(self, turn: Turn) -> None:
        self._engine.grow(_sequence(turn), turn.tokens)


def _sequence(turn: Turn) -> Sequence:
    sequence = turn.session.sequence
    assert sequence is not None
    return sequence
