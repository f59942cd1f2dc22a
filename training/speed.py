"""Duration of a round on this machine: the target's passes by their rows, and the drafter's passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from measurement.pairs.passes import least_seconds, passes
from slipstream.engine.engine import Engine
from training.acceptance import SIZES
from training.trained_drafter import TrainedDrafter

CONTEXT = 128
CHAIN = 4
TRIES = 15


@dataclass(frozen=True)
class Speed:
    plain_s: float
    """A pass of the target without candidates."""
    verify_s: Mapping[int, float]
    """One with so many candidates."""
    draft_s: float
    """The drafter's passes for one round."""

    def tokens_per_s(self, lengths: Mapping[int, float]) -> dict[int, float]:
        """By the number of candidates; 0: without any. One session, and no pass beside another."""
        found = {0: 1.0 / self.plain_s}
        return found | {size: lengths[size] / (self.verify_s[size] + self.draft_s) for size in self.verify_s}


def measure_speed(engine: Engine, drafter: TrainedDrafter, device: torch.device) -> Speed:
    """`engine` has room for some 200 tokens. No pass takes longer than one with more candidates."""
    sizes = (0, *SIZES)

    def draft() -> None:
        drafter.one_pass()
        if device.type == "cuda":  # which computes on its own
            torch.cuda.synchronize(device)

    with passes(engine, CONTEXT, SIZES[-1], CHAIN) as verify:
        *found, draft_s = least_seconds([*(partial(verify, size) for size in sizes), draft], TRIES)
    least = dict(zip(sizes, found, strict=True))
    for smaller, larger in reversed(list(pairwise(sizes))):
        least[smaller] = min(least[smaller], least[larger])
    return Speed(least.pop(0), least, drafter.passes * draft_s)
