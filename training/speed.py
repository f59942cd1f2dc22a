"""What a round takes on this machine: the target's passes by their rows, and the drafter's passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from slipstream.engine.engine import begin_unshared
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from training.acceptance import SIZES
from training.trained_drafter import TrainedDrafter

CONTEXT = 128
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


def measure_speed(target: str, drafter: TrainedDrafter) -> Speed:
    """Times passes of one session of CONTEXT tokens: each kind the least of TRIES, in turn, so that other work on the
    machine meets all of them; no pass takes longer than one with more candidates."""
    engine = open_engine(target, kv_tokens=1024)
    sequence = begin_unshared(engine, CONTEXT + 1 + SIZES[-1])
    prompt = Segment(sequence, [0] * CONTEXT)
    engine.forward([prompt])
    engine.keep(prompt, [])

    def verify(nodes: int) -> None:
        parents = [number - 1 if number % 4 else -1 for number in range(nodes)]
        engine.forward([Segment(sequence, [0], [0] * nodes, parents)]).logits.sum().item()

    sizes = (0, *SIZES)
    least, draft_s = dict.fromkeys(sizes, math.inf), math.inf
    with torch.inference_mode():
        for _ in range(TRIES):
            for nodes in sizes:
                least[nodes] = min(least[nodes], _seconds(partial(verify, nodes)))
            draft_s = min(draft_s, _seconds(drafter.one_pass))
    for smaller, larger in reversed(list(pairwise(sizes))):
        least[smaller] = min(least[smaller], least[larger])
    return Speed(least.pop(0), least, drafter.passes * draft_s)


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
