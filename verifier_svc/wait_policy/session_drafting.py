"""Decides session by session whether drafters draft for it: its own rounds show what its candidates gain.

A text that is copied from its prompt gains several times its speed by drafting, the next one nothing. What drafting
slows (`drafting_trial`) is nearly the same for both. So drafting pays for a session while

    tokens committed / time in plain rounds, by the cost curve  >  slowdown

over its last rounds. Where the slowdown is within LEAST of 1 nothing is lost by drafting, and every session drafts.
Where it is above, a session whose rounds gain less pauses, and tries again later, because texts change: an answer may
begin to quote its prompt.

**What trying costs.** A round that is tried in vain takes `slowdown - gain` plain rounds too much. Each tenant may lose
SHARE of its rounds so; a new session of a tenant whose texts have gained enough lately need not ask.
"""

from __future__ import annotations

from dataclasses import dataclass

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
"""Share of a tenant's rounds that tries in vain may lose."""
CREDIT = 16.0
"""Rounds that a tenant may lose before it has any, and most that it may lose at once."""
TENANT_WEIGHT = 0.02
"""Weight of a round's gain in the average of its tenant."""


class TenantDrafting:
    """What the rounds of one tenant have gained, and what tries may lose."""

    def __init__(self) -> None:
        self.gain = 1.0
        self.credit = CREDIT

    def observe(self, gain: float) -> None:
        """What a round with drafting of one of its sessions gained."""
        self.gain += (gain - self.gain) * TENANT_WEIGHT

    def may_try(self, slowdown: float) -> bool:
        """Whether drafters may draft for a session of which nothing is known yet."""
        return slowdown <= LEAST or self.credit > 0.0 or self.gain > slowdown


@dataclass(slots=True)
class SessionDrafting:
    """Whether drafters draft for one session."""

    drafting: bool = True
    _rounds: int = 0
    """Since drafting began or paused."""
    _counted: int = 0
    """Those that show what drafting gains."""
    _came: bool = False
    """Whether candidates came since drafting began."""
    _tokens: float = 0.0
    """Committed in the counted rounds, the last ones counting most."""
    _time: float = 0.0
    """That these rounds took, in plain rounds."""

    def observe(
        self, tokens: int, candidates: int, candidate_time: float, slowdown: float, tenant: TenantDrafting
    ) -> bool:
        """Records a round that committed `tokens` and verified so many candidates, each of which adds `candidate_time`
        of a plain round by the cost curve. `slowdown`: of steps by drafting. Returns whether `drafting` changed."""
        tenant.credit = min(CREDIT, tenant.credit + SHARE)
        self._rounds += 1
        if self.drafting:
            self._came = self._came or candidates > 0
            time = 1.0 + candidates * candidate_time
            if self._came or self._rounds > SETTLE:
                self._count(tokens, time)
                tenant.observe(tokens / time)
            changes = False
            if slowdown > LEAST:
                tenant.credit -= max(0.0, slowdown - (self._tokens / self._time if self._counted else 1.0))
                changes = self._counted >= TRIED and self._tokens < slowdown * self._time
        else:
            changes = slowdown <= LEAST or (self._rounds >= PAUSED and tenant.may_try(slowdown))
        if changes:
            self.drafting = not self.drafting
            self._rounds = self._counted = 0
            self._came, self._tokens, self._time = False, 0.0, 0.0
        return changes

    def _count(self, tokens: int, time: float) -> None:
        self._counted += 1
        kept = 1.0 - 1.0 / min(self._counted, MEMORY)
        self._tokens = self._tokens * kept + tokens * (1.0 - kept)
        self._time = self._time * kept + time * (1.0 - kept)
