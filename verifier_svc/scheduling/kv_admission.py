"""Decides which sessions have KV: it admits a session when its tokens fit, grows its KV step by step, and preempts it.

Nothing is reserved for tokens that a session may commit later, so many more sessions run than their longest texts would
have room for. Sessions are served in order of `_order`: priority first, then those within their tenant's fair share of
all KV (`fairness.beyond_share`), then arrival.

- **Admit**: a session is admitted when there is room for all its tokens, which is reserved at once, and for one more
  block of each admitted session, which will grow. While it does not fit, smaller ones behind it are admitted, up to
  four times its size; then it has aged, and none of its tenant's is admitted before it. One that alone exceeds the
  share then counts as within it until it ends, and others' sessions wait for it too: it would not come in otherwise.
  Sessions of a lower priority make room for one of a higher, and those beyond their tenant's share for one of another
  tenant that is within its own.
- **Fit**: a step's blocks are taken in that order. A session that finds too few goes without candidates; if that
  does not help, the last session is preempted: it gives up its KV and waits to be admitted again. Its KV is then
  computed anew, or found in the prefix cache, where released blocks stay until they are needed.
- Sessions that cannot run (their client does not read) are preempted before all others. To compute their KV again for
  each token that such a client takes would cost the others more than it gives: they are admitted again once they have
  half of the credit that they can have, or `RETURN_S` seconds after they got some.

So the first session always goes on, because the pool holds the longest session that the service accepts, and every
session ends. With one tenant all are within the share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.segment import KVSequence
from slipstream.speculation.lookahead_window import WindowRows
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.scheduling.fairness import Ageing, Claim, beyond_share, share_of
from verifier_svc.session import Session

RETURN_S = 2.0
"""Seconds for which a session that yielded its KV waits with little credit; well below a gateway's stall limit."""
Order = tuple[int, bool, int]
"""The lower, the sooner: priority, whether it is beyond its tenant's share, arrival."""


class KVAdmission:
    """Owned by the event loop, which alone changes the KV blocks between steps."""

    def __init__(self, kv: KVCache, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self._admitted: dict[Session, None] = {}
        self._waiting: dict[Session, None] = {}
        self._resting: dict[Session, None] = {}
        """Sessions without KV that cannot run."""
        self._returning: dict[Session, float] = {}
        """Sessions that yielded their KV and have little credit, by the monotonic seconds at which they are admitted
        all the same."""
        self._ageing = Ageing[Session]()
        self._share = math.inf
        """Blocks that each tenant may have, as of the last decision for which that mattered."""
        self._beyond: set[Session] = set()
        """Sessions beyond their tenants' shares then."""
        self._without_room: set[Session] = set()
        """Those that waited on when waiting sessions were admitted last; some of them have gone since."""
        self._changes = 0
        """Counts what may let a session in: sessions that came, went, gave up their KV or changed their state."""
        self._refused: tuple[int, int, int] | None = None
        """The changes, the sessions that could not run, and the free blocks when waiting sessions were refused."""
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
        """Sessions that found no room for their KV. One that came while a step runs is none of them; it has not been
        tried."""
        return len(self._without_room & self._waiting.keys())

    @property
    def next_return_s(self) -> float | None:
        """Seconds until a session may be admitted without any other change; None: none is to be."""
        return max(0.0, min(self._returning.values()) - self._clock()) if self._returning else None

    def add_session(self, session: Session) -> None:
        self._waiting[session] = None
        self._changes += 1

    def remove_session(self, session: Session) -> None:
        """Frees the KV of a session that ended: its blocks go back to the pool, where others' sessions may take them.
        No step is running."""
        if session.sequence is not None:
            self._kv.close(session.sequence)
            session.sequence = None
        for sessions in (self._admitted, self._waiting, self._resting, self._returning):
            sessions.pop(session, None)
        self._ageing.forget(session)
        self._changes += 1

    def admit(self) -> Collection[Session]:
        """Admits the sessions that fit; returns all that have KV."""
        for session in [session for session in self._resting if session.runnable]:
            del self._resting[session]
            self._readmit(session)
        for session in [session for session, due in self._returning.items() if self._may_return(session, due)]:
            del self._returning[session]
            self.add_session(session)
        if self._waiting:
            idle = sum(not session.runnable for session in self._admitted)
            state = self._changes, idle, self._kv.blocks_free
            if self._refused is None or state[:-1] != self._refused[:-1] or state[-1] > self._refused[-1]:
                self._admit_waiting()
                self._refused = *state[:-1], self._kv.blocks_free
                self._without_room = set(self._waiting)
        return self._admitted.keys()

    def _admit_waiting(self) -> None:
        for session in [session for session in self._waiting if not session.runnable]:
            del self._waiting[session]
            self._resting[session] = None
        self._note_shares()
        tried, held = set[str](), set[str]()
        for session in sorted(self._waiting, key=self._order):
            # Each tenant's first may fit by what is cached or by preemption; others pass it if they fit as they are.
            if session.request.tenant in held or (session.request.tenant in tried and not self._small(session)):
                continue
            if self._try_to_admit(session):
                del self._waiting[session]
                self._ageing.admit(session, self._blocks(session))
                continue
            tried.add(session.request.tenant)
            self._ageing.wait(session, self._blocks(session))
            if self._ageing.aged(session):
                held.add(session.request.tenant)
                if self._too_large(session):
                    break

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
        self._note_shares()
        victims = self._victims(self._admitted)
        for scheduled in sorted(step, key=lambda each: self._order(each.session)):
            if scheduled.session.sequence is not None and (fit := self._fit(scheduled, victims)) is not None:
                fitted.append(fit)
        if not fitted:
            self._preempt(max(self._admitted, key=self._order))
        return fitted

    def _order(self, session: Session) -> Order:
        beyond = session in self._beyond and not (self._too_large(session) and self._ageing.aged(session))
        return session.request.priority, beyond, session.arrival

    def _too_large(self, session: Session) -> bool:
        """Whether the session alone exceeds its tenant's share."""
        return self._blocks(session) + 1 > self._share

    def _blocks(self, session: Session) -> int:
        """Blocks of the session's tokens, whoever else reads them too."""
        return -(-len(session.tokens) // self._kv.block_size)

    def _small(self, session: Session) -> bool:
        """Whether the session fits, whatever is cached."""
        return self._blocks(session) + len(self._admitted) <= self._kv.blocks_free

    def _note_shares(self) -> None:
        """Finds out which sessions are beyond their tenants' shares. Those that cannot run have no claim: any other one
        may take their KV, and that must not change whose turn it is."""
        claiming = (session for session in (*self._admitted, *self._waiting) if session.runnable)
        every = sorted(claiming, key=lambda session: session.rank)
        # One block more, which is kept free for each session to grow.
        claims = [Claim(each, each.request.tenant, self._blocks(each) + 1, each in self._admitted) for each in every]
        self._share = share_of(claims, self._kv.blocks_total)
        self._beyond = beyond_share(claims, self._share)

    def _readmit(self, session: Session) -> None:
        """A session without KV has credit again."""
        if session.yielded_kv and session.low_on_credit:
            self._returning[session] = self._clock() + RETURN_S
        else:
            self.add_session(session)

    def _may_return(self, session: Session, due: float) -> bool:
        return not session.low_on_credit or self._clock() >= due

    def _try_to_admit(self, session: Session) -> bool:
        victims = self._victims(self._makes_room(session))
        found_of = () if session.scores_prompt else session.tokens  # what the cache holds has no logits
        sequence = self._kv.begin(found_of, session.request.cache_salt)
        pending = len(session.tokens) - sequence.length
        preempted = self._first_victims(self._kv.missing(sequence, pending), victims)
        if preempted is None:
            self._kv.close(sequence)
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
            if not victims or (victims[0].runnable and self._order(victims[0]) <= self._order(scheduled.session)):
                return None
            self._preempt(victims.pop(0))

    def _makes_room(self, session: Session) -> Iterable[Session]:
        """Those that a waiting session may preempt if they run: of lower priority, or beyond the share of a tenant
        while this one is within another's."""
        within = not self._order(session)[1]
        for each in self._admitted:
            beyond = within and each.request.tenant != session.request.tenant and self._order(each)[1]
            if each.request.priority > session.request.priority or (
                beyond and each.request.priority == session.request.priority
            ):
                yield each

    def _victims(self, running: Iterable[Session]) -> list[Session]:
        """Sessions in the order in which they are preempted: those that cannot run, then those of `running` that can,
        from the last in order up."""
        idle = sorted((each for each in self._admitted if not each.runnable), key=lambda each: each.idle_since)
        return [*idle, *sorted((each for each in running if each.runnable), key=self._order, reverse=True)]

    def _preempt(self, session: Session) -> None:
        self._kv.close(_held(session))
        session.sequence, session.computed = None, 0
        del self._admitted[session]
        self._changes += 1
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


def _held(session: Session) -> KVSequence:
    assert session.sequence is not None
    return session.sequence
