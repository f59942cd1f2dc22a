"""What a simulation found, as Markdown for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.simulation_choice import Yield

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to get candidates, at one temperature."""

    candidates: str
    temperature: float
    yields: Sequence[Yield]
    """By number of candidates."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Candidates of one kind whose parent was accepted."""

    temperature: float
    depth: int
    """5 is 5 and deeper."""
    first: bool
    """Whether likelier than its siblings."""
    nodes: int
    confidence: float
    """Mean."""
    accepted: float
    """Share."""


@dataclass(frozen=True, slots=True)
class Report:
    sizes: Sequence[int]
    checked: int
    """Texts that the real target wrote with candidates, token by token the same."""
    tables: Mapping[str, Sequence[Row]]
    belief: Sequence[Belief]

    def write(self, prompts: int, tokens: int) -> None:
        """To stdout and to `RESULTS`."""
        command = f"python -m benchmarks.simulation --prompts {prompts} --tokens {tokens}"
        text = "\n".join([*self._head(command), *self._rows(), *self._belief()])
        print(text)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "simulation.md").write_text(text + "\n")
        content = {"command": command, **asdict(self)}
        (RESULTS / "simulation.json").write_text(json.dumps(content, indent=1) + "\n")

    def _head(self, command: str) -> list[str]:
        return [
            "# Tokens for each target pass in an ideal system",
            "",
            f"`{command}`: a column for each number of candidates",
            "verified in every round; all tokens over all passes, in brackets the lowest and the highest of a prompt.",
            f"{self.checked} of {self.checked} texts, written again by the real target with candidates of the model",
            "and suffix drafters, were the same token by token.",
            "",
        ]

    def _rows(self) -> list[str]:
        lines: list[str] = []
        for title, rows in self.tables.items():
            lines += [f"## {title}", "", f"| T | candidates | {' | '.join(map(str, self.sizes))} |"]
            lines.append("|---" * (len(self.sizes) + 2) + "|")
            for row in rows:
                cells = " | ".join(_cell(given) for given in row.yields)
                lines.append(f"| {row.temperature} | {row.candidates} | {cells} |")
            lines.append("")
        return lines

    def _belief(self) -> list[str]:
        return [
            "## What the model drafter claims, and what is accepted",
            "",
            "Candidates whose parent was accepted; depth 5 is 5 and deeper.",
            "",
            "| T | depth | guess | candidates | mean confidence | accepted |",
            "|---|---|---|---|---|---|",
            *(
                f"| {kind.temperature} | {kind.depth} | {'first' if kind.first else 'other'} | {kind.nodes} "
                f"| {kind.confidence:.2f} | {kind.accepted:.2f} |"
                for kind in self.belief
            ),
        ]


def _cell(given: Yield) -> str:
    return f"{given.mean:.2f} ({given.lowest:.1f}-{given.highest:.1f})" if given.highest > 1.0 else "1.00"
