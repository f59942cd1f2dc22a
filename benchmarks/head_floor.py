"""How surely a verifier knows at its start whether an EAGLE head fits: its accuracy on texts of the target's own.

    python -m benchmarks.head_floor --target TARGET --head HEAD

The verifier writes `local_drafters.OWN_TEXTS` texts of OWN_LENGTH tokens and refuses heads that find less of them than
`VERIFIER_MIN_HEAD_ACCURACY`. Here many are written, and the least, mean and most of groups of so many are printed, by
length: for the head, for the head with the target's layers in another order, and with its layer's weights drawn anew.
Nothing is timed.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.records import Row, write
from slipstream.engine.engine import HiddenStates
from slipstream.engine.factory import open_engine
from slipstream.proposers.base import HiddenNeed
from slipstream.proposers.eagle import one_step_accuracy
from slipstream.proposers.eagle_checkpoint import load_head
from slipstream.proposers.eagle_head import EagleHead
from slipstream.proposers.head_file import read_target
from verifier_svc.hidden_feed import HiddenFeed, WrittenText
from verifier_svc.sources.local_drafters import OWN_LENGTH, OWN_TEXTS

TOKENS = 64
LENGTHS = (OWN_LENGTH, TOKENS)
GROUPS = (1, 4, OWN_TEXTS)
KV_TOKENS = 16_384
INITIAL = 0.02
"""Standard deviation of weights that were not trained."""


def accuracies(head: EagleHead, texts: list[WrittenText], order: tuple[int, ...], length: int) -> list[float]:
    """Share of each text's first tokens that the head has right; `order`: the layers whose states take the place of the
    head's own."""
    accuracy, found = one_step_accuracy(head), list[float]()
    for text in texts:
        rows = text.states.cut(0, length)
        layers = dict(zip(head.config.layers, (rows.layers[each] for each in order), strict=True))
        found.append(accuracy(text.tokens[:length], HiddenStates(rows.last, layers), text.chosen[:length]))
    return found


def main(
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    head: Annotated[str, typer.Option(help="Folder of the head.")],
    count: Annotated[int, typer.Option(help="Texts of 64 tokens that are written.")] = 32,
) -> None:
    """Print the accuracies of groups of texts."""
    torch.set_num_threads(1)
    loaded = load_head(head, read_target(target), torch.float32)
    engine, layers = open_engine(target, "float32", kv_tokens=KV_TOKENS), loaded.config.layers
    start = next(iter(engine.model.eos_token_ids), 0)
    untrained = copy.deepcopy(loaded)
    with torch.inference_mode():
        need = HiddenNeed(tuple(sorted(set(layers))), every_row=True)
        texts = HiddenFeed(engine).write_texts(need, start, count, TOKENS)
        for weight in untrained.layers.parameters():
            weight.copy_(INITIAL * torch.randn_like(weight))
    kinds = {"this head": (loaded, layers), "layers turned": (loaded, layers[::-1]), "untrained": (untrained, layers)}
    rows: list[Row] = []
    for (name, (one, order)), length in itertools.product(kinds.items(), LENGTHS):
        shares = accuracies(one, texts, order, length)
        for group in GROUPS:
            means = [sum(shares[at : at + group]) / group for at in range(0, len(shares) - group + 1, group)]
            row: Row = {"head": name, "texts": group, "tokens": length}
            rows.append(row | {"least": min(means), "mean": sum(means) / len(means), "most": max(means)})
    named = Path(target).name
    write(f"head_floor_{named}", f"python -m benchmarks.head_floor --target {named} --head {Path(head).name}", rows)


if __name__ == "__main__":
    typer.run(main)
