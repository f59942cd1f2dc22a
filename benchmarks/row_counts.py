"""What a target's own rows of logits hold: how much the likeliest few of the vocabulary, and whether shortlists do.

Rows at every place of known texts, from one pass over each. No clock: what is counted are tokens and probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from benchmarks.equality_steps import Text
from benchmarks.records import Row
from slipstream.engine.engine import Engine
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.segment import Segment

TEMPERATURES = (0.8, 1.0)
HELD = (8, 32, 128)
MASSES = (0.9, 0.95)
SHORTLIST = coupled_sampling._SHORTLIST
REACH, SPARSE = coupled_sampling._REACH, coupled_sampling._SPARSE


@torch.inference_mode()
def logits(engine: Engine, text: Text) -> torch.Tensor:
    """float32 [tokens of the text, vocabulary]."""
    sequence = engine.kv.begin_unshared(len(text.prompt) + len(text.plain))
    chain = text.plain[:-1]
    segment = Segment(sequence, text.prompt, chain, list(range(-1, len(chain) - 1)))
    rows = engine.forward([segment]).logits.float()
    engine.kv.close(sequence)
    return rows


def row_counts(engine: Engine, texts: Sequence[Text]) -> Iterator[Row]:
    found = [(text, logits(engine, text)) for text in texts]
    for temperature in TEMPERATURES:
        shares: dict[str, list[float]] = {}

        def add(name: str, values: torch.Tensor, shares: dict[str, list[float]] = shares) -> None:
            shares.setdefault(name, []).extend(values.double().tolist())

        for text, raw in found:
            rows = raw / temperature
            order = rows.sort(dim=-1, descending=True)
            mass = order.values.double().softmax(-1).cumsum(-1)
            for count in HELD:
                add(f"in {count} likeliest", mass[:, count - 1])
            for share in MASSES:
                add(f"top-p {share:g} beyond {SHORTLIST}", mass[:, SHORTLIST - 1] < share)
            places = len(text.prompt) + np.arange(len(rows))
            chosen, _ = coupled_sampling.choose(rows, [False] * len(rows), [text.seed] * len(rows), places)
            rank = (order.indices == chosen[:, None]).int().argmax(-1)
            add(f"chosen beyond {SHORTLIST}", rank >= SHORTLIST)
            near = (rows >= rows.amax(-1, keepdim=True) - REACH).double().mean(-1)
            add("within reach", near)
            add(f"rows below {SPARSE:g} within reach", near < SPARSE)
        row: Row = {"T": temperature, "rows": len(next(iter(shares.values())))}
        yield row | {name: float(np.mean(values)) for name, values in shares.items()}
