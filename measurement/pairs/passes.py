"""Seconds of a target's passes on this machine, by the candidates in them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.segment import Segment


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
