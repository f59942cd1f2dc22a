"""Shares of tenants in a step, such that none makes another one's times more than double. Pure, without a clock.

**The promise.** Beside T - 1 other tenants, a tenant has a T-th of the tokens a second that it would have alone, and no
step takes longer than T of its own. Whoever comes last at most doubles the steps of those that were there before.

**By construction.** A tenant's *own step* is the one that the planner would choose if there were no other tenant: its
sessions, the candidates that pay there, a piece of its prompts. Let u be the shortest of the tenants' own steps, in
predicted seconds. A step takes at most

    L = T * u,    and at most twice what it takes without the tenant that has more than half of it.

The tokens that take L are divided by deficit round robin (`slipstream.fair_shares`), so that each tenant has those of
its own step or as many as any other one. Where those are fewer than its sessions, some sit this step out, those that
decoded last (`Shares.places`); its prompts leave its sessions half of them. A session costs more than its token: if as
many tokens as the shortest own step has take longer than L for each, because others bring them by more sessions, some
of these sit the step out too. Within that the budget chooses what brings the most tokens a second, as for one tenant;
only if that leaves a tenant less than was promised do candidates of its own step come first (`Shares.least`), and
prompts have what they were given (`Shares.prompts`), however much the rest takes.

Why that is enough: the tenant with the shortest own step has all of it in a step of at most L, for T times its tokens,
brought by T times its sessions, take no longer, whatever a curve predicts. Any other one has the
tokens of its own step in as many seconds, or as many of them as anyone: with t(n) = a + b * n, and n tokens in the
shortest own step, it has a / b + n tokens in T * (a + b * n) seconds, a T-th of 1 / b, the most that it could have in
any step. No session waits for ever: two tokens of two tenants take no longer in one step than in two, so each tenant
has one at least, and its sessions take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.fair_shares import ROUNDING, DeficitRoundRobin, TenantDemand
from verifier_svc.scheduling.budget import Offer, allot
from verifier_svc.scheduling.prefill import tokens_within


class StepWork(NamedTuple):
    """Work that a tenant could use a step for."""

    sessions: int
    """Those that decode."""
    aside: int
    """Candidates of those that do not compete."""
    offers: Sequence[Offer]
    """Offers of the sessions that compete."""
    prompts: int
    """Tokens of prompts, without KV."""

    @property
    def most(self) -> float:
        """Tokens that a step could commit, whatever its candidates cost."""
        return self.sessions + sum(sum(offer.probabilities[: offer.cap]) for offer in self.offers)


class OwnStep(NamedTuple):
    """The step that a tenant would have alone."""

    tokens: int
    """Tokens of its sessions, with their candidates."""
    prompts: int
    expected: float
    """Tokens that it commits."""
    seconds: float

    @property
    def size(self) -> int:
        return self.tokens + self.prompts


class StepCosts(NamedTuple):
    """Seconds of steps, and the part of prompts in them."""

    seconds: Callable[[int, int], float]
    """Seconds of a step with so many tokens and sessions."""
    over: Callable[[int], Callable[[range], Sequence[float]]]
    """By sessions, the seconds of many sizes at once."""
    prompts: float
    """Seconds that prompts add, by what `seconds` gives."""
    beside: Callable[[int, int], int]
    """Most prompt tokens of a step with so many tokens and sessions that decode."""
    alone: int
    """Most prompt tokens of a step in which nothing decodes."""
    room: int
    """Most tokens of a step."""

    def whole(self, tokens: int, sessions: int, prompts: int) -> float:
        """Seconds of a step with prompts."""
        own = self.seconds(tokens, sessions) if tokens else 0.0
        return own + self.prompts * (self.seconds(tokens + prompts, max(1, sessions)) - own) if prompts else own

    def within(self, sessions: int, limit_s: float, most: int) -> int:
        """Tokens of so many sessions that take so many seconds."""
        return tokens_within(lambda size: self.seconds(size, sessions), most, limit_s)

    def own(self, work: StepWork) -> tuple[OwnStep, list[int]]:
        """The step with this work alone, and how many candidates of each offer are in it."""
        if not work.sessions:
            prompts = min(work.prompts, self.alone)
            return OwnStep(0, prompts, 0.0, self.whole(0, 0, prompts)), []
        base = work.sessions + work.aside
        prompts = min(work.prompts, self.beside(base, work.sessions)) if work.prompts else 0
        found = allot(work.offers, self.over(work.sessions), self.room - base - prompts, base, prompts)
        tokens = base + sum(found.counts)
        expected = found.tokens + work.sessions - len(work.offers)
        return OwnStep(tokens, prompts, expected, self.whole(tokens, work.sessions, prompts)), found.counts


class TenantPart(NamedTuple):
    """A tenant's part of a step."""

    sessions: int
    """Those that decode."""
    tokens: int
    """Tokens of its sessions, with their candidates."""
    expected: float
    """Tokens that it commits."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of one step."""

    tokens: Mapping[str, int]
    """Most tokens of each tenant's sessions, with their candidates."""
    places: Mapping[str, int]
    """Number of its sessions that decode in the step, by tenant."""
    least: Mapping[str, int]
    """Competing candidates of each tenant that come first, where it has less than was promised."""
    prompts: int
    """Tokens of all prompts."""
    rates: Mapping[str, float]
    """Tokens a second that each tenant is promised."""

    def owed(self, parts: Mapping[str, TenantPart], seconds: float) -> set[str]:
        """The tenants that have too little of a step of so many seconds."""
        return {
            tenant
            for tenant, least in self.least.items()
            if least and parts[tenant].expected < self.rates[tenant] * seconds * (1.0 - ROUNDING)
        }


class StepShares:
    """Divides one step after another among tenants."""

    def __init__(self) -> None:
        self._turns = DeficitRoundRobin[str]()

    def divide(
        self, works: Mapping[str, StepWork], cost: StepCosts, parts: Mapping[str, TenantPart], seconds: float
    ) -> tuple[float, Shares | None]:
        """Most seconds of a step, and the tenants' shares of it; None where one of so many `seconds` with these
        `parts`, which is the best for all together, keeps the promise."""
        least_s = _least_s(works, cost)
        limit_s = len(works) * min(least_s.values())
        if seconds <= limit_s and _kept(works, least_s, parts, seconds):
            return limit_s, None
        own = {tenant: cost.own(work)[0] for tenant, work in works.items()}
        shortest = min(own, key=lambda tenant: own[tenant].seconds)
        limit_s = len(works) * own[shortest].seconds
        floor = Level(own[shortest].size, max(1, works[shortest].sessions))
        rates = {tenant: step.expected / (len(works) * step.seconds) for tenant, step in own.items()}
        heavy = _heavy({tenant: part.tokens + own[tenant].prompts for tenant, part in parts.items()}) or _heavy(
            {tenant: step.size for tenant, step in own.items()}
        )
        if len(works) > 2 and heavy is not None:
            rest = {tenant: work for tenant, work in works.items() if tenant != heavy}
            seconds, without = _together(rest, cost)
            if 2.0 * seconds < limit_s:
                limit_s, floor = 2.0 * seconds, Level(1, 1)
            for tenant, part in without.items():
                rate = 0.5 * part.expected / seconds
                if rate >= rates[tenant]:  # what it would have without the heavy one is enough
                    rates[tenant] = rate
                    own[tenant] = own[tenant]._replace(tokens=part.tokens)
        for tenant, part in parts.items():
            if part.tokens < own[tenant].tokens and part.expected >= rates[tenant] * limit_s:  # enough in any step
                own[tenant] = own[tenant]._replace(tokens=part.tokens)
        level = _level(works, own, cost, limit_s, floor)
        given = self._given(own, sum(min(step.size, level.tokens) for step in own.values()))
        divided = {tenant: _tenant_step(works[tenant], own[tenant], given[tenant], level.sessions) for tenant in own}
        tokens = {tenant: each.tokens for tenant, each in divided.items()}
        places = {tenant: each.sessions for tenant, each in divided.items()}
        candidates = {
            tenant: max(0, min(own[tenant].tokens, tokens[tenant]) - places[tenant] - work.aside)
            for tenant, work in works.items()
        }
        return limit_s, Shares(tokens, places, candidates, sum(each.prompts for each in divided.values()), rates)

    def _given(self, own: Mapping[str, OwnStep], room: int) -> dict[str, int]:
        """Tokens of each tenant."""
        if sum(step.size for step in own.values()) <= room:
            return {tenant: step.size for tenant, step in own.items()}
        given = dict.fromkeys(own, 0)

        def spend(tenant: str, units: float) -> float:
            given[tenant] += int(units)
            return int(units)

        self._turns.divide(room, {tenant: TenantDemand(step.size) for tenant, step in own.items()}, spend)
        return given


def _heavy(sizes: Mapping[str, int]) -> str | None:
    """The tenant with more than half of all; None where there is none."""
    most = max(sizes, key=sizes.__getitem__)
    return most if 2 * sizes[most] > sum(sizes.values()) else None


class Level(NamedTuple):
    """The most that each tenant has of a step."""

    tokens: int
    sessions: int
    """Number of its own sessions that decode."""


class _TenantStep(NamedTuple):
    """A tenant's part of a step."""

    sessions: int
    tokens: int
    """Tokens of its sessions, with their candidates."""
    prompts: int


def _level(
    works: Mapping[str, StepWork], own: Mapping[str, OwnStep], cost: StepCosts, limit_s: float, floor: Level
) -> Level:
    """Sizes of a step of so many seconds: as many tokens as fit with all sessions that may bring them, at least those
    of `floor`, and then as many sessions as fit with these, at least those of `floor`."""
    most = Level(max(step.size for step in own.values()), max(1, *(work.sessions for work in works.values())))

    def seconds(level: Level) -> float:
        steps = [
            _tenant_step(works[tenant], step, min(step.size, level.tokens), level.sessions)
            for tenant, step in own.items()
        ]
        sessions, tokens, prompts = map(sum, zip(*steps, strict=True))
        return math.inf if tokens + prompts > cost.room else cost.whole(tokens, sessions, prompts)

    tokens = tokens_within(lambda size: seconds(Level(size, most.sessions)), most.tokens, limit_s)
    if tokens >= floor.tokens:
        return Level(tokens, most.sessions)
    sessions = tokens_within(lambda count: seconds(Level(floor.tokens, count)), most.sessions, limit_s)
    return Level(floor.tokens, max(sessions, floor.sessions))


def _tenant_step(work: StepWork, own: OwnStep, given: int, most_sessions: int) -> _TenantStep:
    """Returns the part that so many tokens are for a tenant that has at most so many sessions in the step."""
    tokens = max(min(own.tokens, math.ceil(given / 2)), given - own.prompts)
    prompts = given - tokens
    sessions = min(work.sessions, tokens, most_sessions)
    if sessions < min(work.sessions, tokens):  # those that sit it out take their candidates with them
        tokens = min(tokens, math.ceil(own.tokens * sessions / work.sessions))
    return _TenantStep(sessions, tokens, prompts)


def _least_s(works: Mapping[str, StepWork], cost: StepCosts) -> dict[str, float]:
    """Least seconds of each own step, found at once: none is shorter than one without candidates."""
    return {
        tenant: cost.seconds(work.sessions, work.sessions) if work.sessions else cost.own(work)[0].seconds
        for tenant, work in works.items()
    }


def _kept(
    works: Mapping[str, StepWork], least_s: Mapping[str, float], parts: Mapping[str, TenantPart], seconds: float
) -> bool:
    """Whether each tenant has what is promised, however little its own step would take, and however much it would
    commit; and none has more than half of a step of several."""
    if len(works) > 2 and _heavy({tenant: part.tokens for tenant, part in parts.items()}) is not None:
        return False
    return all(
        parts[tenant].expected * len(works) * least_s[tenant] >= work.most * seconds * (1.0 - ROUNDING)
        for tenant, work in works.items()
    )


def _together(works: Mapping[str, StepWork], cost: StepCosts) -> tuple[float, dict[str, TenantPart]]:
    """Seconds of the step of several tenants as if they were one, and what each has of it."""
    whole = StepWork(
        sum(work.sessions for work in works.values()),
        sum(work.aside for work in works.values()),
        [offer for work in works.values() for offer in work.offers],
        sum(work.prompts for work in works.values()),
    )
    step, counts = cost.own(whole)
    parts, left = dict[str, TenantPart](), iter(counts)
    for tenant, work in works.items():
        chosen = list(zip(work.offers, left, strict=False))
        tokens = work.sessions + work.aside + sum(count for _, count in chosen)
        expected = work.sessions + sum(sum(offer.probabilities[:count]) for offer, count in chosen)
        parts[tenant] = TenantPart(work.sessions, tokens, expected)
    return step.seconds, parts
