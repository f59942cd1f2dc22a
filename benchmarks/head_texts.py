"""How far an EAGLE head follows its target on prompts of several kinds, with the share of texts that loop.

    python -m benchmarks.head_texts prompts.jsonl --target TARGET --head HEAD --each 6

Lines have `turns` (the first one is asked) and perhaps `category`, as Spec-Bench's do, or `messages` and `workload`.
The target answers greedily by its engine; its answers and hidden states stay in `--out`, so that another head of the
same layers is measured on the same texts in seconds. Nothing is timed: acceptance does not hang on the machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.proposers.eagle_checkpoint import load_head
from slipstream.proposers.head_file import read_target
from training.acceptance import Ranks, measure_ranks, simulate
from training.eagle import Eagle
from training.request import TrainRequest
from training.samples import SampleMaker
from training.target import Target
from training.texts import Sample

LONGEST = 400
"""Tokens of a prompt: longer ones take minutes each on few cores."""
DEPTH = 4
KV_TOKENS = 24_576


Prompt = tuple[list[int], str]
"""Tokens and kind."""


def read_prompts(paths: list[Path], target: Target, each: int) -> list[Prompt]:
    """The first `each` prompts of every kind that are not too long."""
    found: dict[str, list[Prompt]] = defaultdict(list)
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            fields: dict[str, Any] = json.loads(line)
            kind = str(fields.get("category") or fields.get("workload") or path.stem)
            messages = fields.get("messages") or [{"role": "user", "content": fields["turns"][0]}]
            if len(found[kind]) < each and len(tokens := target.prompt("", messages)) <= LONGEST:
                found[kind].append((tokens, kind))
    return [prompt for asked in found.values() for prompt in asked]


def main(
    prompts: Annotated[list[Path], typer.Argument(help="JSONL files of prompts.")],
    target: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    head: Annotated[str, typer.Option(help="Folder of the head.")],
    out: Annotated[Path, typer.Option(help="Folder for the answers.")] = Path(".cache/head-texts"),
    each: Annotated[int, typer.Option(help="Prompts of each kind.")] = 6,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 96,
) -> None:
    """Print acceptance by kind of prompt."""
    loaded = load_head(head, read_target(target), torch.float32)
    request = TrainRequest(
        "eagle", target, str(out / "head"), dtype="float32", answer_tokens=tokens, depth=DEPTH, temperature=0.0,
        aux_layers=loaded.config.layers, version=3 if loaded.config.layers else 1,
    )  # fmt: skip
    opened = Target(target, dtype="float32", kv_tokens=KV_TOKENS)
    drafter = Eagle(request, opened, torch.ones(opened.vocabulary, dtype=torch.int64))
    drafter.load(loaded)
    maker = SampleMaker(request, opened, drafter.layers)
    samples = maker.answer_all(read_prompts(prompts, opened, each))
    ranks = measure_ranks(drafter, maker, samples)
    typer.echo(f"{'kind':<16} {'texts':>5} {'loop':>5} {'distinct':>8}  {'first':>5} {'8':>5} {'16':>5}  by depth")
    for kind in dict.fromkeys(each.workload for each in samples):
        typer.echo(_row(kind, samples, ranks, [each.workload == kind for each in samples]))
    typer.echo(_row("all", samples, ranks, [True] * len(samples)))
    typer.echo(_row("without loops", samples, ranks, [_distinct(each) >= DISTINCT for each in samples]))


def _row(name: str, samples: list[Sample], ranks: list[Ranks], counted: list[bool]) -> str:
    distinct = [_distinct(each) for each, of in zip(samples, counted, strict=True) if of]
    found = simulate([each for each, of in zip(ranks, counted, strict=True) if of])
    depths = " ".join(f"{share:.2f}" for share in found.by_depth)
    return (
        f"{name:<16} {len(distinct):5d} {sum(share < DISTINCT for share in distinct):5d} "
        f"{sum(distinct) / max(1, len(distinct)):8.2f}  {found.by_depth[0] if found.by_depth else 0.0:5.2f} "
        f"{found.lengths[8]:5.2f} {found.lengths[16]:5.2f}  {depths}"
    )


def _distinct(sample: Sample) -> float:
    """Share of different 4-grams in the answer."""
    return distinct_share(sample.tokens[sample.first :])


if __name__ == "__main__":
    typer.run(main)
