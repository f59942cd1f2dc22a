"""Decides which sessions have KV: it admits a session when its tokens fit, grows its KV step by step, and preempts it.

Nothing is reserved for tokens that a session may commit later, so many more sessions run than their longest texts would
have room for. Sessions are served in order of `rank`: priority first, then arrival.

- **Admit**: the first session without KV is admitted when there is room for all its tokens, which is reserved at once,
  and for one more block of each admitted session, which will grow. While it does not fit, none behind it is admitted
  either: short prompts do not starve a long one. Sessions of a lower priority make room for one of a higher.
- **Fit**: a step's blocks are taken in order of rank. A session that finds too few goes without candidates; if that
  does not help, the last session is preempted: it gives up its KV and waits to be admitted again. Its KV is then
  computed anew, or found in the prefix cache, where released blocks stay until they are needed.
- Sessions that cannot run (their client does not read) are preempted before all others. To compute their KV again for
  each token that such a client takes would cost the others more than it gives: they are admitted again once they have
  half of the credit that they can have, or `RETURN_S` seconds after they got some.

So the first admitted session always goes on, because the pool holds the longest session that the service accepts, and
every session ends.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from slipstream.engine.segment import Sequence as KVSequence
from slipstream.speculation.lookahead import WindowRows
from verifier_svc.execution.executor import KVBlocks, ScheduledSequence
from verifier_svc.session import Rank, Session

RETURN_S = 2.0
"""Seconds for which a session that yielded its KV waits with little credit; well below a gateway's stall limit."""


class KVAdmission:
    """Owned by the event loop, which alone changes the KV blocks between steps."""

    def __init__(self, kv: KVBlocks, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self._admitted: dict[Session, None] = {}
        self._waiting: dict[Session, None] = {}
        self._queue: list[tuple[Rank, Session]] = []
        """A heap of the waiting sessions, and of some that ended or were admitted."""
        self._resting: dict[Session, None] = {}
        """Sessions without KV that cannot run."""
        self._returning: dict[Session, float] = {}
        """Sessions that yielded their KV and have little credit, by the monotonic seconds at which they are admitted
        all the same."""
        self._refusal: _Refusal | None = None
        self.preemptions = 0
        """Times that a session gave up its KV before it ended."""
        self.prefix_tokens_sought = self.prefix_tokens_found = 0
        """Tokens of sessions when they were admitted for the first time, and those of them whose KV was cached."""

    @property
    def waiting(self) -> int:
        """Sessions without KV."""
        return len(self._waiting) + len(self._resting) + len(self._returning)

    @property
    def refused(self) -> int:
        """Sessions that found no room for their KV: the first one of the queue that did not fit when it was tried last,
        and all behind it. One that came while a step runs is none of them; it has not been tried."""
        tried = self._refusal is not None and self._refusal.session in self._waiting
        return len(self._waiting) if tried else 0

    @property
    def next_return_s(self) -> float | None:
        """Seconds until a session may be admitted without any other change; None: none is to be."""
        return max(0.0, min(self._returning.values()) - self._clock()) if self._returning else None

    def add_session(self, session: Session) -> None:
        self._waiting[session] = None
        heapq.heappush(self._queue, (session.rank, session))

    def remove_session(self, session: Session) -> None:
        """Frees the KV of a session that ended. No step is running."""
        if session.sequence is not None:
            self._kv.close(session.sequence)
            session.sequence = None
        for sessions in (self._admitted, self._waiting, self._resting, self._returning):
            sessions.pop(session, None)
        if len(self._queue) > 2 * len(self._waiting) + 64:  # most entries are of sessions that ended
            self._queue = [(waiting.rank, waiting) for waiting in self._waiting]
            heapq.heapify(self._queue)

    def admit(self) -> Collection[Session]:
        """Admits the sessions that fit; returns all that have KV."""
        for session in [session for session in self._resting if session.runnable]:
            del self._resting[session]
            self._readmit(session)
        for session in [session for session, due in self._returning.items() if self._may_return(session, due)]:
            del self._returning[session]
            self.add_session(session)
        while self._queue:
            rank, session = heapq.heappop(self._queue)
            if session not in self._waiting:
                continue
            if not session.runnable:
                self._resting[session] = None
            elif not self._try_to_admit(session):
                heapq.heappush(self._queue, (rank, session))
                break
            del self._waiting[session]
        return self._admitted.keys()

    def fit(self, step: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Reserves KV for the sequences of a step. Returns those that fit, some without candidates; `step` itself when
        all do. When none fits, the last admitted session is preempted, so that there is more KV the next time."""
        missing = 0
        for scheduled in step:
            self._kv.rollback(_held(scheduled.session), scheduled.computed)
            missing += self._missing(scheduled)
        if missing <= self._kv.blocks_free:
            for scheduled in step:
                self._grow(scheduled)
            return step
        fitted: list[ScheduledSequence] = []
        victims = self._victims()
        for scheduled in sorted(step, key=lambda each: each.session.rank):
            if scheduled.session.sequence is not None and (fit := self._fit(scheduled, victims)) is not None:
                fitted.append(fit)
        if not fitted:
            self._preempt(max(self._admitted, key=lambda session: session.rank))
        return fitted

    def _readmit(self, session: Session) -> None:
        """A session without KV has credit again."""
        if session.yielded_kv and session.low_on_credit:
            self._returning[session] = self._clock() + RETURN_S
        else:
            self.add_session(session)

    def _may_return(self, session: Session, due: float) -> bool:
        return not session.low_on_credit or self._clock() >= due

    def _try_to_admit(self, session: Session) -> bool:
        victims = self._victims((session.priority, sys.maxsize))
        refusal = _Refusal(session, len(session.tokens), len(self._admitted), len(victims), self._kv.blocks_free)
        if self._refusal is not None and refusal.repeats(self._refusal):
            return False
        sequence = self._kv.begin(session.tokens, session.cache_salt)
        pending = len(session.tokens) - sequence.length
        preempted = self._first_victims(self._kv.missing(sequence, pending), victims)
        if preempted is None:
            self._kv.close(sequence)
            self._refusal = refusal
            return False
        for victim in preempted:
            self._preempt(victim)
        self._kv.grow(sequence, pending)
        session.sequence, session.computed = sequence, sequence.length
        self._admitted[session] = None
        session.yielded_kv = False
        if not session.admitted_once:
            session.admitted_once = True
            self.prefix_tokens_sought += len(session.tokens) - 1
            self.prefix_tokens_found += sequence.length
            session.found_tokens = sequence.length
        return True

    def _first_victims(self, missing: int, victims: Sequence[Session]) -> Sequence[Session] | None:
        """The first of `victims`, as many as must be preempted to admit a session that needs `missing` blocks; None if
        all are too few."""
        admitted, free = len(self._admitted), self._kv.blocks_free
        for count in range(len(victims) + 1):
            if not admitted or missing + admitted <= free:
                return victims[:count]
            if count < len(victims):
                free += self._kv.owned(_held(victims[count]))
                admitted -= 1
        return None

    def _fit(self, scheduled: ScheduledSequence, victims: list[Session]) -> ScheduledSequence | None:
        """Reserves KV for the sequence, with its candidates or without; None if no session of lower rank is left to
        preempt. Room depends on how many candidates there are, not on their tokens, so the ratio rule stays exact."""
        while True:
            for each in (scheduled, scheduled._replace(window=WindowRows()), scheduled.plain):
                if self._missing(each) <= self._kv.blocks_free:
                    self._grow(each)
                    return each
            if not victims or (victims[0].runnable and victims[0].rank <= scheduled.session.rank):
                return None
            self._preempt(victims.pop(0))

    def _victims(self, rank: Rank | None = None) -> list[Session]:
        """Sessions in the order in which they are preempted: those that cannot run, then the others from the last rank
        up; with `rank`, of the others only those behind it."""
        idle = sorted((each for each in self._admitted if not each.runnable), key=lambda each: each.idle_since)
        running = (each for each in self._admitted if each.runnable and (rank is None or each.rank > rank))
        return [*idle, *sorted(running, key=lambda each: each.rank, reverse=True)]

    def _preempt(self, session: Session) -> None:
        self._kv.close(_held(session))
        session.sequence, session.computed = None, 0
        del self._admitted[session]
        self.preemptions += 1
        session.yielded_kv = not session.runnable
        if session.yielded_kv:
            self._resting[session] = None
        else:
            self.add_session(session)

    def _missing(self, scheduled: ScheduledSequence) -> int:
        return self._kv.missing(_held(scheduled.session), scheduled.tokens)

    def _grow(self, scheduled: ScheduledSequence) -> None:
        self._kv.grow(_held(scheduled.session), scheduled.tokens)


class _Refusal(NamedTuple):
    """A session that did not fit, and the state of the KV cache at that time."""

    session: Session
    tokens: int
    admitted: int
    victims: int
    free: int

    def repeats(self, last: _Refusal) -> bool:
        """True when the session cannot fit now either: all is as it was, and no block more is free."""
        return self[:-1] == last[:-1] and self.free <= last.free


def _held(session: Session) -> KVSequence:
    assert session.sequence is not None
    return session.sequence
