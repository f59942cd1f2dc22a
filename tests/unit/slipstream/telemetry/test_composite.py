"""Several observers as one: every moment reaches all that want it, in their order, and no other."""

from __future__ import annotations

from slipstream.telemetry.composite import composite


class Observer:
    def began(self, number: int) -> None: ...

    def ended(self, number: int, *, whole: bool) -> None: ...


class Writing(Observer):
    def __init__(self, lines: list[str], name: str) -> None:
        self._lines, self._name = lines, name

    def ended(self, number: int, *, whole: bool) -> None:
        self._lines.append(f"{self._name} {number} {whole}")


def test_each_moment_reaches_every_observer_in_order_through_composites_too() -> None:
    lines: list[str] = []
    inner = composite(Observer, [Writing(lines, "first"), Observer(), Writing(lines, "second")])
    both = composite(Observer, [inner, Writing(lines, "third")])
    both.began(1)
    both.ended(2, whole=True)
    assert lines == ["first 2 True", "second 2 True", "third 2 True"]


def test_one_without_observers_does_nothing() -> None:
    alone = composite(Observer, [])
    alone.began(1)
    alone.ended(2, whole=False)
    assert type(alone) is Observer
