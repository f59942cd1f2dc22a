"""What a round takes on this machine: the target's passes by their rows, and the drafter's passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.segment import Segment
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


@contextmanager
def passes(engine: Engine, context: int, most: int, chain: int) -> Iterator[Callable[[int], None]]:
    """Passes of one session of `context` tokens, by their candidates: up to `most`, in chains of `chain`."""
    sequence = engine.kv.begin_unshared(context + 1 + most)
    prompt = Segment(sequence, [0] * context)
    engine.forward([prompt])
    engine.kv.keep(prompt, [])

    def verify(count: int) -> None:
        parents = [node - 1 if node % chain else -1 for node in range(count)]
        engine.forward([Segment(sequence, [0], [0] * count, parents)]).logits.sum().item()

    yield verify
    engine.kv.close(sequence)


def least_seconds(kinds: Sequence[Callable[[], object]], tries: int) -> list[float]:
    """The least of so many tries of each, in turn, so that other work on the machine meets all of them."""
    least = [math.inf] * len(kinds)
    with torch.inference_mode():
        for _ in range(tries):
            for index, run in enumerate(kinds):
                began = time.perf_counter()
                run()
                least[index] = min(least[index], time.perf_counter() - began)
    return least
