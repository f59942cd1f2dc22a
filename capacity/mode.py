"""The three ways to serve that a plan compares, as cells to simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from capacity.cell import Cell
from capacity.scenario import Scenario

RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1))
"""Drafters to verifiers."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A cell is the smallest number of verifiers that has whole drafters; a fleet is many."""

    name: str
    cell: Cell

    @property
    def drafters(self) -> int:
        return self.cell.drafters if self.cell.drafting is not None else 0

    def price(self, scenario: Scenario) -> float:
        """Of a cell, an hour."""
        return self.cell.verifiers * scenario.prices.verifier + self.drafters * scenario.prices.drafter


def plain(scenario: Scenario) -> Mode:
    return Mode("no speculation", Cell(scenario.verifying, None, client_s=scenario.client_s))


def colocated(scenario: Scenario) -> Mode | None:
    """The draft model on the verifier's own device, its passes and the target's in turn."""
    if scenario.colocated is None:
        return None
    room = min(scenario.verifying.kv_tokens, scenario.colocated_kv_tokens or scenario.verifying.kv_tokens)
    verifying = replace(scenario.verifying, draft=scenario.colocated, kv_tokens=room)
    return Mode("co-located", Cell(verifying, None, client_s=scenario.client_s))


def disaggregated(scenario: Scenario, drafters: int, verifiers: int) -> Mode:
    cell = Cell(scenario.verifying, scenario.drafting, verifiers, drafters, scenario.client_s)
    return Mode(f"{drafters} drafters : {verifiers} verifiers", cell)


def modes(scenario: Scenario, ratios: Sequence[tuple[int, int]] = RATIOS) -> list[Mode]:
    fixed = [mode for mode in (plain(scenario), colocated(scenario)) if mode is not None]
    return fixed + [disaggregated(scenario, *ratio) for ratio in ratios]
