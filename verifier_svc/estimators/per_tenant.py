"""What is learned for each tenant apart: what one tenant's requests teach decides nothing for another's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_TENANTS = 256
"""Tenants that are remembered; the one that was used longest ago goes first."""


class PerTenant(Generic[T]):
    """One value for each tenant, made when it is first asked for. Sessions without a tenant's name share one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: OrderedDict[str, T] = OrderedDict()

    def __getitem__(self, tenant: str) -> T:
        value = self._values.get(tenant)
        if value is None:
            value = self._values[tenant] = self._make()
            if len(self._values) > MOST_TENANTS:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(tenant)
        return value

    def __iter__(self) -> Iterator[T]:
        return iter(self._values.values())
