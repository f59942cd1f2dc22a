"""The figures of `slipstream doctor --target`: rounds, and what is counted of them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

DEPTH = 8
"""Longest chain that is tried."""
TEMPERATURES = (0.0, 1.0)
LENGTHS = (128, 512, 2048, 8192, 32768)
"""Tokens of context at which a new bucket begins."""
FEW_ROUNDS = 8
"""Rounds below which a bucket or a slice gives no warning."""


@dataclass(frozen=True, slots=True)
class Round:
    """Outcome of one proposal."""

    context: int
    """Committed tokens below it."""
    workload: str
    temperature: float
    proposed: int
    accepted: int


@dataclass(slots=True)
class PairCheck:
    """Everything that the command prints, in figures."""

    target: str
    draft: str
    method: str
    translated: bool = False
    """The drafter translates from a vocabulary of its own."""
    ships: bool = False
    verdict: str = ""
    """Why, in one sentence."""
    remedies: list[str] = field(default_factory=list)
    """Changes that may make the pair one that ships, most promising first."""
    findings: list[tuple[str, str]] = field(default_factory=list)
    """`ok`, `warning` or `WRONG`, and a sentence."""
    by_depth: list[float] = field(default_factory=list)
    """Share of candidates accepted at each depth, where those above were; at temperature 0."""
    by_slice: dict[str, float] = field(default_factory=dict)
    """Tokens of a round, the target's own included, at temperature 0."""
    by_context: dict[str, float] = field(default_factory=dict)
    by_temperature: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    places: int = 0
    """Tokens of greedy texts at which the drafter was tried."""
    first: float | None = None
    """Share of them where its first candidate was right; None for a lookup."""
    looping: int = 0
    """Texts that were left out of all figures of acceptance, since they repeat themselves."""
    looping_by_temperature: dict[str, int] = field(default_factory=dict)
    texts: int = 0
    """As many at each temperature."""
    distinct: float = 1.0
    """Mean share of distinct 4-grams in the texts, looping ones included."""
    target_parameters: int = 0
    draft_parameters: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes."""
    plain_ms: float = 0.0
    """One token without a drafter."""
    draft_ms: float = 0.0
    """One call of the drafter; a model is called once for each token of a chain."""
    verify_ms: dict[int, float] = field(default_factory=dict)
    """A pass of the target with so many candidates."""
    speed_up: dict[int, float] = field(default_factory=dict)
    """By draft length, for one session, with drafting and verifying one after the other."""

    @property
    def wrong(self) -> bool:
        return any(level == "WRONG" for level, _ in self.findings)

    def note(self, level: str, sentence: str) -> None:
        self.findings.append((level, sentence))


def mean_length(rounds: Sequence[Round], most: int = DEPTH) -> float:
    """Tokens of a round, with chains of at most `most` candidates."""
    return 1.0 + sum(min(each.accepted, most) for each in rounds) / len(rounds)


def bucket(context: int) -> str:
    at = bisect_right(LENGTHS, context)
    low = LENGTHS[at - 1] if at else 0
    return f"{low}-{LENGTHS[at] - 1}" if at < len(LENGTHS) else f"{low}+"


def summarise(check: PairCheck, rounds: list[Round]) -> None:
    greedy = [each for each in rounds if not each.temperature]
    check.rounds = len(greedy)
    for depth in range(DEPTH):
        tried = [each for each in greedy if each.proposed > depth and each.accepted >= depth]
        if len(tried) < FEW_ROUNDS // 2:
            break
        check.by_depth.append(sum(each.accepted > depth for each in tried) / len(tried))
    slices: dict[str, list[Round]] = defaultdict(list)
    contexts: dict[str, list[Round]] = defaultdict(list)
    for each in sorted(greedy, key=lambda each: each.context):
        slices[each.workload].append(each)
        contexts[bucket(each.context)].append(each)
    check.by_slice = {name: mean_length(some) for name, some in slices.items()}
    check.by_context = {name: mean_length(some) for name, some in contexts.items()}
    for temperature in TEMPERATURES:
        if some := [each for each in rounds if each.temperature == temperature]:
            check.by_temperature[f"{temperature:g}"] = mean_length(some)
