"""Which sessions a drafting step serves where several tenants draft, so that none makes another one's steps longer than
double: the rule of the verifier's `step_shares`, without candidates that compete.

A step takes at most T times what the shortest of the T tenants' own steps would take. What a tenant wants next is known
only once its text went on, and no step is broken off for it, so a tenant that rests counts as what it wanted last. The
tokens that take so long are divided by deficit round robin; a session that finds no room waits for the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from slipstream.fair_shares import DeficitRoundRobin, TenantDemand
from slipstream.proposers.drafting.session import DraftSession

FORGET = 0.95
"""Factor by which each step reduces the weight of the steps before it."""
ALIKE = 1e-6
"""Share of their variation by which levels and tokens of steps must differ."""
LEAST_READ = 16
"""Least tokens of a piece of a prompt."""
PROMPTS = 4
"""The inverse share of a tenant's tokens that is kept for its prompts, while there are any."""


class Want(NamedTuple):
    """Demand of a session that has a step by itself."""

    session: DraftSession
    tokens: int
    is_prompt: bool


class DraftCost:
    """Seconds of a step, modelled as level_s for each level and token_s for each token: a least-squares fit of errors
    relative to the step's seconds, in which old steps fade."""

    def __init__(self) -> None:
        self.level_s = self.token_s = 0.0
        self._ll = self._lt = self._tt = self._l = self._t = 0.0

    def observe(self, levels: int, tokens: int, seconds: float) -> None:
        if seconds <= 0.0:
            return
        level, token = levels / seconds, tokens / seconds
        self._ll, self._lt = self._ll * FORGET + level * level, self._lt * FORGET + level * token
        self._tt, self._l = self._tt * FORGET + token * token, self._l * FORGET + level
        self._t = self._t * FORGET + token
        apart = self._ll * self._tt - self._lt * self._lt
        if apart > ALIKE * self._ll * self._tt:
            self.level_s = max(0.0, (self._l * self._tt - self._t * self._lt) / apart)
        self.token_s = max(0.0, (self._t - self.level_s * self._lt) / self._tt) if self._tt else 0.0
        if not self.token_s and self._ll:
            self.level_s = self._l / self._ll

    def free_tokens(self, levels: int) -> float:
        """Tokens that take as long as so many levels; 0 while nothing is known."""
        return levels * self.level_s / self.token_s if self.token_s else 0.0


class DraftShares:
    def __init__(self) -> None:
        self.cost = DraftCost()
        self._turns = DeficitRoundRobin[str]()
        self._least: dict[str, int] = {}
        """Tokens that each tenant wanted last."""

    def divide(self, wants: Iterable[Want], tenants: Sequence[str], levels: int, most: int) -> dict[DraftSession, int]:
        """The sessions of the next step, of at most `most` tokens, and how many tokens each may have. `tenants`: all
        that draft; `levels`: of the step. In the order of `wants`, prompts last and within a share of their own."""
        queues: dict[str, list[Want]] = {}
        for want in wants:
            queues.setdefault(want.session.tenant, []).append(want)
        sums = {tenant: min(sum(want.tokens for want in queue), most) for tenant, queue in queues.items()}
        self._least = {tenant: sums.get(tenant, self._least.get(tenant, most)) for tenant in tenants}
        least = min(self._least.values(), default=most)
        room = min(most, len(tenants) * least + int((len(tenants) - 1) * self.cost.free_tokens(levels)))
        return self._given(queues, sums, max(1, room))

    def _given(self, queues: Mapping[str, list[Want]], sums: Mapping[str, int], room: int) -> dict[DraftSession, int]:
        given: dict[DraftSession, int] = {}

        def take(want: Want, left: float) -> float:
            size = want.tokens - given.get(want.session, 0)
            if want.is_prompt:
                size = min(size, max(LEAST_READ, int(left)))
            given[want.session] = given.get(want.session, 0) + size
            return left - size

        def spend(tenant: str, units: float) -> float:
            """Takes units for the tenant. The last take may be larger than what is left: the tenant owes it to the next
            step."""
            prompts = [each for each in queues[tenant] if each.is_prompt and each.tokens > given.get(each.session, 0)]
            left, kept = units, units / PROMPTS if prompts else 0.0
            for each in queues[tenant]:
                fits = each.tokens <= left - kept or left == units
                if not each.is_prompt and each.session not in given and fits:
                    left = take(each, left)
            for each in prompts:
                if left > 0.0:
                    left = take(each, left)
            return units - left

        demands = {
            tenant: TenantDemand(sums[tenant], max(map(_item, queue))) for tenant, queue in queues.items() if queue
        }
        self._turns.divide(room, demands, spend)
        return given


def _item(want: Want) -> int:
    return min(want.tokens, LEAST_READ) if want.is_prompt else want.tokens
