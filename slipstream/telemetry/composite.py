"""Several observers as one, so that what is observed makes one call for each moment and no loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Observer = TypeVar("Observer")


def composite(kind: type[Observer], observers: Sequence[Observer]) -> Observer:
    """An observer of this kind, each method of which calls those of `observers` that override it, in their order.
    `kind` is the interface: its public methods do nothing and return None."""
    made = kind()
    for name, nothing in vars(kind).items():
        if not name.startswith("_"):
            methods = [getattr(each, name) for each in observers]
            calls = [method for method in methods if getattr(method, "__func__", None) is not nothing]
            if calls:
                setattr(made, name, calls[0] if len(calls) == 1 else _in_turn(calls))
    return made


def _in_turn(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call_all(*arguments: Any, **named: Any) -> None:
        for call in calls:
            call(*arguments, **named)

    return call_all
