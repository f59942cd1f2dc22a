"""Shares of what all tenants want, for instance of the time of a step. Pure; no clock, no session.

**The rule.** A tenant gets what it asks for or as much as any other one, whichever is less (max-min). So nothing is
left over while a tenant wants it, a lone tenant has everything, and sending more requests makes no share larger.

- `fair_level` is the most that each may have.
- `may_take_slot` keeps slots that are held for long, such as sessions, from going to one tenant alone.
- `DeficitRoundRobin` divides one room after another by it, step after step. Items are whole, and some cost more than
  others, so a step gives a tenant more or less than its share; it owes the rest to the next steps (Shreedhar and
  Varghese 1995). No deficit exceeds one item, and a tenant without demand has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

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


SHARE_OF_FREE = 7
"""Slots that a tenant may hold for each one that is free."""


def may_take_slot(tenant: str, held: int, used: int, slots: int) -> bool:
    """Whether a tenant that holds `held` of the `used` slots may take another: no more than a multiple of the free ones
    (Choudhury and Hahne 1998, "Dynamic queue length thresholds"). So one tenant alone stops at seven eighths of them,
    two at seven fifteenths each, and the next one finds a free slot. Without tenants' names, all may be taken."""
    free = slots - used
    return free > 0 and (not tenant or held < SHARE_OF_FREE * free)


class TenantDemand(NamedTuple):
    """A tenant's demand of one step."""

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
        """Calls `spend(tenant, units)`, which uses at most so many units, or one item that is larger, and returns how
        many it used: first with each tenant's share and what it is owed, then item by item with what was left.
        Together they use at most `room`, but for such items; one larger than that counts as `room`."""
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

        # Those that get all they ask for come first, so that no other one's last item costs them any of it.
        for tenant in sorted(credits, key=lambda tenant: (wanted[tenant] > level, -credits[tenant])):
            give(tenant, credits[tenant])
        again = True
        while again and left > 0.0:
            again = False
            for tenant in sorted(credits, key=lambda tenant: -credits[tenant]):
                again |= give(tenant, items[tenant])
        waiting = [tenant for tenant, item in items.items() if wanted[tenant] > ROUNDING * item]
        unusable = left / len(waiting) if waiting else 0.0  # no item was small enough for it: no tenant is owed it
        self._owed = {tenant: min(max(credits[tenant] - unusable, -items[tenant]), items[tenant]) for tenant in waiting}
