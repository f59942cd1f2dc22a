"""Shares of what all tenants want: places in a step, blocks of KV. Pure; no clock, no session.

Shares are max-min and divided by deficit round robin (`slipstream.fair_shares`).

- `turns` puts sessions in an order in which each tenant's first comes before any tenant's second.
- `beyond_share` names the sessions that a tenant has beyond its share of KV: others may take their room.
- `Ageing` lets small sessions pass one that does not fit, until they were `PASSES` times its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from slipstream.fair_shares import fair_level

PASSES = 4
"""Total size of the sessions that may pass one that does not fit, as a multiple of its size."""

K = TypeVar("K", bound=Hashable)


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
