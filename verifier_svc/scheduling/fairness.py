"""Shares of what all tenants want: tokens of a step, places in it, blocks of KV. Pure; no clock, no session.

**The rule.** A tenant gets what it asks for or as much as any other one, whichever is less (max-min). So nothing is
left over while somebody wants it, a lone tenant has everything, and sending more requests makes no share larger.

- `fair_level` is the most that each may have.
- `DeficitRoundRobin` divides a step's tokens by it, step after step. Tokens are whole, and one behind a long context
  costs more than others, so a step gives a tenant more or less than its share; it owes the rest to the next steps
  (Shreedhar and Varghese 1995). No deficit exceeds one item, and a tenant without demand has none.
- `turns` puts sessions in an order in which each tenant's first comes before any tenant's second.
- `beyond_share` names the sessions that a tenant has beyond its share of KV: others may take their room.
- `Ageing` lets small sessions pass one that does not fit, until they were `PASSES` times its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

PASSES = 4
"""What does not fit is passed by others of at most so many times its size."""
ROUNDING = 1e-9
"""Share of an item by which sums of shares may miss it."""

K = TypeVar("K", bound=Hashable)


def fair_level(demands: Iterable[float], room: float) -> float:
    """The most that each may have, so that all together take no more than `room`; infinite where all demands fit."""
    left = sorted(demands)
    for index, demand in enumerate(left):
        share = room / (len(left) - index)
        if demand > share:
            return max(share, 0.0)
        room -= demand
    return math.inf


class TenantDemand(NamedTuple):
    """What a tenant asks of one step."""

    units: float
    """All that it could use."""
    item: float = 1.0
    """Units of its largest single item; above 0."""


class DeficitRoundRobin(Generic[K]):
    """Divides the room of one step after another among tenants."""

    def __init__(self) -> None:
        self._owed: dict[K, float] = {}

    def owed(self, tenant: K) -> float:
        """Units that the tenant got too few of so far; negative: too many."""
        return self._owed.get(tenant, 0.0)

    def divide(self, room: float, demands: Mapping[K, TenantDemand], spend: Callable[[K, float], float]) -> None:
        """Calls `spend(tenant, units)`, which uses at most so many units and returns how many it used: first with each
        tenant's share and what it is owed, then item by item with what was left. Together they use at most `room`; an
        item larger than that counts as `room`."""
        level = fair_level((demand.units for demand in demands.values()), room)
        credits = {tenant: min(level, demand.units) + self.owed(tenant) for tenant, demand in demands.items()}
        wanted = {tenant: demand.units for tenant, demand in demands.items()}
        items = {tenant: min(demand.item, room) for tenant, demand in demands.items()}
        left = room

        def give(tenant: K, units: float) -> bool:
            """Whether the tenant used any."""
            nonlocal left
            units = min(units, left) + ROUNDING * items[tenant]
            if units < min(items[tenant], wanted[tenant]) or wanted[tenant] <= ROUNDING * items[tenant]:
                return False
            used = spend(tenant, units)
            credits[tenant] -= used
            wanted[tenant] -= used
            left -= used
            return used > 0.0

        for tenant in sorted(credits, key=lambda tenant: -credits[tenant]):
            give(tenant, credits[tenant])
        again = True
        while again and left > 0.0:
            again = False
            for tenant in sorted(credits, key=lambda tenant: -credits[tenant]):
                again |= give(tenant, items[tenant])
        waiting = [tenant for tenant, item in items.items() if wanted[tenant] > ROUNDING * item]
        unusable = left / len(waiting) if waiting else 0.0  # no item was small enough for it: it is owed to nobody
        self._owed = {tenant: min(max(credits[tenant] - unusable, -items[tenant]), items[tenant]) for tenant in waiting}


def turns(tenants: Iterable[str]) -> list[int]:
    """For each, how many of the same tenant stand before it: whatever is taken in this order is shared fairly."""
    seen = Counter[str]()
    found: list[int] = []
    for tenant in tenants:
        found.append(seen[tenant])
        seen[tenant] += 1
    return found


class Claim(NamedTuple, Generic[K]):
    """A session that has KV or waits for it."""

    session: K
    tenant: str
    blocks: int
    held: bool
    """Whether the session has its KV."""


def share_of(claims: Iterable[Claim[K]], room: int) -> float:
    """Each tenant's fair share of `room` blocks; infinite where all claims fit, and for a lone tenant."""
    wanted = Counter[str]()
    for claim in claims:
        wanted[claim.tenant] += claim.blocks
    return fair_level(wanted.values(), room) if len(wanted) > 1 else math.inf


def beyond_share(claims: Iterable[Claim[K]], share: float) -> set[K]:
    """The sessions with which their tenants exceed their share: of each tenant's, in the order given, those from which
    on the sum is too large. One that waits and alone exceeds the share takes no part in the sum."""
    sums, beyond = Counter[str](), set[K]()
    for claim in claims:
        if sums[claim.tenant] + claim.blocks > share:
            beyond.add(claim.session)
            if not claim.held and claim.blocks > share:
                continue
        sums[claim.tenant] += claim.blocks
    return beyond


class Ageing(Generic[K]):
    """Counts what passed each one that did not fit."""

    def __init__(self) -> None:
        self._may_pass: dict[K, float] = {}
        """The size of all that may yet pass it; none may at 0 and below, whatever its own size comes to be."""
        self._waiting: set[K] = set()

    def wait(self, waiting: K, size: float) -> None:
        """It does not fit; what is admitted from now on passes it."""
        self._may_pass.setdefault(waiting, PASSES * size)
        self._waiting.add(waiting)

    def admit(self, admitted: K, size: float) -> None:
        """`admitted`, of this size, passes all others that wait. What passed itself is remembered: it may have to wait
        again."""
        self._waiting.discard(admitted)
        for each in self._waiting:
            self._may_pass[each] -= size

    def aged(self, waiting: K) -> bool:
        """Whether nothing else may pass it any more."""
        return self._may_pass.get(waiting, math.inf) <= 0.0

    def forget(self, ended: K) -> None:
        self._may_pass.pop(ended, None)
        self._waiting.discard(ended)
