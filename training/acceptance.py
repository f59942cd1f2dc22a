"""Acceptance of a drafter's candidates along texts: measured on ranks, for chains and for trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from slipstream.proposers.parallel_drafting import RANKS, falling, grow
from training.samples import SampleMaker
from training.texts import Sample
from training.trained_drafter import UNKNOWN, TrainedDrafter

SIZES = (1, 2, 4, 8, 16, 32)
"""Candidates of a pass."""
ROWS = 8
Ranks = list[list[int]]
"""[places][depth] of one text, without the UNKNOWN at its end."""


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Reach of a drafter's candidates along greedy texts of the target: one is right if it is the text's token."""

    roots: int
    by_depth: list[float]
    """Share of the first choices that were right where the ones before them were."""
    table: list[list[float]]
    """[depth][RANKS] the same share of each rank, after candidates of any rank."""
    lengths: dict[int, float]
    """Tokens of a round, the target's own one included, by the candidates of its tree."""


@torch.no_grad()
def measure_ranks(drafter: TrainedDrafter, maker: SampleMaker, samples: Sequence[Sample]) -> list[Ranks]:
    """Ranks of the text's tokens among the drafter's candidates, at every place of every text."""
    drafter.module.eval()
    found: list[Ranks] = []
    for begin in range(0, len(samples), ROWS):
        batch, states = maker.batch(samples[begin : begin + ROWS])
        for row in drafter.ranks(batch, states).permute(1, 2, 0).tolist():  # [T][depth]
            # A root before the prompt's end has no candidate that is judged, though what lies behind it has one.
            found.append([list(takewhile(lambda rank: rank != UNKNOWN, place)) for place in row])
    drafter.module.train()
    return [[place for place in text if place] for text in found]


def simulate(texts: Sequence[Ranks]) -> SimulatedAcceptance:
    """Raises nothing for no texts: then nothing is accepted."""
    depth = max((len(place) for text in texts for place in text), default=0)
    places = [place for text in texts for place in text]
    by_depth = [_share(place[each] == 0 for place in places if _right(place, each, 1)) for each in range(depth)]
    table = [
        [_share(place[each] == rank for place in places if _right(place, each, RANKS)) for rank in range(RANKS)]
        for each in range(depth)
    ]
    lengths = {}
    for size in SIZES:
        tree = {path for path, _ in grow([falling(row) for row in table], size)}
        lengths[size] = _walk(texts, tree)
    return SimulatedAcceptance(len(places), by_depth, table, lengths)


def _right(place: list[int], depth: int, below: int) -> bool:
    """Whether the ranks in front of this depth are known and under `below`."""
    return len(place) > depth and all(rank < below for rank in place[:depth])


def _share(hits: Iterable[bool]) -> float:
    counted = list(hits)
    return sum(counted) / len(counted) if counted else 0.0


def _walk(texts: Sequence[Ranks], tree: set[tuple[int, ...]]) -> float:
    """Tokens of a round over all texts, each decoded round by round with this tree of ranks."""
    rounds = tokens = 0
    for text in texts:
        at = 0
        while at < len(text):
            accepted = 0
            while accepted < len(text[at]) and tuple(text[at][: accepted + 1]) in tree:
                accepted += 1
            at += 1 + accepted
            tokens += 1 + accepted
            rounds += 1
    return tokens / rounds if rounds else 1.0
