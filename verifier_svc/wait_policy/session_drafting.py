"""Decides session by session whether drafters draft for it: its own rounds show what its candidates gain.

A text that is copied from its prompt gains several times its speed by drafting, the next one nothing. What drafting
slows (`drafting_trial`) is nearly the same for both. So drafting pays for a session while

    tokens committed / time in plain rounds, by the cost curve  >  slowdown

over its last rounds. Where the slowdown is within LEAST of 1 nothing is lost by drafting, and every session drafts.
Where it is above, a session whose rounds gain less pauses, and tries again later, because texts change: an answer may
begin to quote its prompt.

**What trying costs.** A round that is tried in vain takes `slowdown - gain` plain rounds too much. A session pauses for
so long that its next try loses SHARE of its rounds. New sessions of a tenant are tried as long as all its tries have
lost no more than SHARE of its rounds and what its drafting has earned. A try that is under way counts as lost: sessions
that begin at once do not each lose the same credit. The average gain does not decide: one text in ten that is copied
from its prompt pays for nine tries in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEAST = 1.03
"""Slowdown up to which all sessions draft: measurements are no better."""
TRIED = 12
"""Counted rounds after which a session may pause."""
SETTLE = 4
"""Rounds after drafting began that do not count until candidates come."""
MEMORY = 32
"""Rounds that count most: each further one weighs 1 / MEMORY of all."""
PAUSED = 32
"""Least rounds of a pause."""
SHARE = 0.01
"""Share of rounds that tries in vain may lose."""
CREDIT = 8.0
"""Rounds that a tenant may lose before it has any, and most that SHARE adds up to."""
MOST_CREDIT = 128.0
"""Most rounds that drafting earns its tenant for tries: so many are lost when its texts cease to gain."""


def slows(slowdown: float) -> bool:
    """Whether drafting takes enough of the verifier's steps to decide for each session whether it pays."""
    return slowdown > LEAST


class TenantDrafting:
    """Plain rounds that tries for one tenant's sessions may still lose."""

    def __init__(self) -> None:
        self.credit = CREDIT
        self.tries = 0
        """Tries for new sessions that are under way."""

    def new_session(self, slowdown: float) -> SessionDrafting:
        """Whether drafters draft for a session that begins."""
        session = SessionDrafting(self, drafting=self.may_try(slowdown))
        if session.drafting and slows(slowdown):
            session.start_try()
        return session

    def may_try(self, slowdown: float) -> bool:
        """Whether drafters may draft for a session of which nothing is known yet."""
        return not slows(slowdown) or self.credit > self.tries * (SETTLE + TRIED) * (slowdown - 1.0)

    def observe_round(self) -> None:
        """A round of any of its sessions."""
        if self.credit < CREDIT:
            self.credit = min(CREDIT, self.credit + SHARE)

    def observe_gain(self, gain: float, slowdown: float) -> None:
        """A round with drafting of one of its sessions, whose last ones gained so much."""
        self.credit = min(MOST_CREDIT, self.credit + gain - slowdown)


@dataclass(slots=True)
class SessionDrafting:
    """Whether drafters draft for one session."""

    tenant: TenantDrafting = field(default_factory=TenantDrafting, compare=False)
    drafting: bool = True
    _trying: bool = False
    """Whether this is a try of a new session, which its tenant's credit pays for."""
    _rounds: int = 0
    """Since drafting began or paused."""
    _counted: int = 0
    """Those that show what drafting gains."""
    _came: bool = False
    """Whether candidates came since drafting began."""
    _tokens: float = 0.0
    """Tokens committed in the counted rounds, the last ones counting most."""
    _time: float = 0.0
    """Time that the counted rounds took, in plain rounds."""
    _rest: float = 0.0
    """Rounds of the present pause, which its own rounds have asked for; 0: it was never tried."""

    def start_try(self) -> None:
        self._trying = True
        self.tenant.tries += 1

    def end_try(self) -> None:
        """The try's result is known, or the session ends."""
        if self._trying:
            self._trying = False
            self.tenant.tries -= 1

    def resume(self) -> None:
        """Drafters draft for the session again, and what it gained before counts no more."""
        self._switch(drafting=True)
        self._rest = 0.0

    def count(self, tokens: int, candidates: int, candidate_time: float) -> None:
        """Records a round with drafting that committed `tokens` and verified so many candidates, each of which adds
        `candidate_time` of a plain round by the cost curve. Called for each session of each step: calls nothing."""
        self._rounds += 1
        if candidates:
            self._came = True
        if self._came or self._rounds > SETTLE:
            self._counted += 1
            weight = 1.0 / (self._counted if self._counted < MEMORY else MEMORY)
            self._tokens += (tokens - self._tokens) * weight
            self._time += (1.0 + candidates * candidate_time - self._time) * weight

    def decide(self, slowdown: float) -> bool:
        """After each round while drafting `slows` steps, paused ones included: whether `drafting` changed."""
        self.tenant.observe_round()
        changes = self._pauses(slowdown) if self.drafting else self._tries_again(slowdown)
        if changes:
            self._switch(drafting=not self.drafting)
        return changes

    def _pauses(self, slowdown: float) -> bool:
        """After a round with drafting."""
        gain = self._tokens / self._time if self._counted else 1.0
        self.tenant.observe_gain(gain, slowdown)
        if self._counted < TRIED:
            return False
        self.end_try()
        if gain < slowdown:
            self._rest = max(PAUSED, (SETTLE + TRIED) * (slowdown - gain) / SHARE)
        return gain < slowdown

    def _tries_again(self, slowdown: float) -> bool:
        """After a round without: its own rounds pay for the next try, its tenant's credit for the first."""
        self._rounds += 1
        if self._rest:
            return self._rounds >= self._rest
        if self.tenant.may_try(slowdown):
            self.start_try()
            return True
        return False

    def _switch(self, *, drafting: bool) -> None:
        self.drafting = drafting
        self._rounds = self._counted = 0
        self._came, self._tokens, self._time = False, 0.0, 0.0
