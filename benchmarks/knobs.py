"""Values of the lookups' settings on a target's own texts, by counts: tokens a pass, candidates, honesty of claims.

usage: python -m benchmarks.knobs [--target FOLDER] [--prompts FILE ...] [--count N] [--tokens N] [--dtype D]

The target answers prompts (first turns of JSON lines with the key `turns`, in its chat template; without files pieces
of source code) greedily and at T = 0.8. Then each setting proposes beside the known texts, a tree a pass, with no clock
anywhere: `tokens a pass` counts the accepted candidates and the bonus token, `claimed` is the sum of the candidates'
own probabilities over what was accepted (1 is honest), `distinct` the share of distinct 4-grams of the texts, for loops
accept any draft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.equality_steps import SHIPPED, Decoding, Text
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from slipstream.engine.factory import open_engine
from slipstream.proposers import lookup
from slipstream.proposers.suffix import LEAST_PROBABILITY, SuffixText, TreeBounds
from slipstream.tokenizer.vocabulary import load_tokenizer
from training.corpus import distinct_share
from verifier_svc.execution.embedded import EmbeddedExecutor

KINDS = ("greedy", "T = 0.8")
LONGEST_PROMPT = 700
WIDTH, NODES = 4, 32


@dataclass(frozen=True)
class Knobs:
    """One row of the table; the defaults are the product's."""

    nodes: int = NODES
    width: int = WIDTH
    least: float = LEAST_PROBABILITY
    doubt: float = lookup.DOUBT

    def open(self) -> lookup.Text:
        return SuffixText(None, TreeBounds(self.width, self.least), 0)


def variations() -> Iterator[tuple[str, Knobs]]:
    """The name of what is varied, and its value."""
    yield "defaults", Knobs()
    for nodes in (4, 8, 16, 64):
        yield f"max draft tokens {nodes}", Knobs(nodes=nodes)
    for width in (1, 2, 8):
        yield f"width {width}", Knobs(width=width)
    for least in (0.01, 0.1, 0.2, 0.4):
        yield f"LEAST_PROBABILITY {least:g}", Knobs(least=least)
    for doubt in (1.0, 4.0, 8.0):
        yield f"DOUBT {doubt:g}", Knobs(doubt=doubt)


@contextmanager
def doubting(doubt: float) -> Iterator[None]:
    """Lookups with another prior while the block runs."""
    usual, lookup.DOUBT = lookup.DOUBT, doubt
    try:
        yield
    finally:
        lookup.DOUBT = usual


@dataclass
class Counts:
    passes: int = 0
    tokens: int = 0
    candidates: int = 0
    claimed: float = 0.0

    def read(self, prompt: list[int], output: list[int], knobs: Knobs) -> None:
        """Proposes beside one known text."""
        text = knobs.open()
        text.read(list(prompt))
        at = 0
        while at < len(output):
            found = text.look_up([], knobs.nodes)
            accepted = self._accept(found, output[at:])
            new = output[at : at + accepted + 1]
            text.read(new)
            at += len(new)
            self.passes += 1
            self.tokens += len(new)
            self.candidates += len(found)
        text.finish()

    def _accept(self, found: Sequence[lookup.FoundNode], rest: list[int]) -> int:
        """How many tokens of the rest the tree holds; adds its nodes' probabilities of being reached."""
        paths, place, depth = [1.0], 0, 0
        for number, node in enumerate(found, start=1):
            paths.append(paths[node.parent] * node.probability)
            self.claimed += paths[-1]
            if node.parent == place and depth < len(rest) and node.token == rest[depth]:
                place, depth = number, depth + 1
        return depth


def turns(files: Sequence[str], count: int) -> list[str]:
    """First turns, spread over all files."""
    lines = [line for name in files for line in Path(name).read_text("utf-8").splitlines()]
    return [json.loads(line)["turns"][0] for line in lines[:: max(1, len(lines) // count)]][:count]


def prompts(target: str, files: Sequence[str], count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(target)
    if not files:
        return [tokenizer.encode(text).ids for text in held_out(count, characters=1500)]
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(target)
    asked = [[{"role": "user", "content": turn}] for turn in turns(files, count)]
    written = [template.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in asked]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in written]


@torch.inference_mode()
def answers(target: str, dtype: str, asked: list[list[int]], tokens: int) -> list[Text]:
    """Every prompt's text in both kinds, each up to where the model ends it."""
    torch.set_num_threads(1)
    room = sum(len(each) + tokens + 64 for each in asked) * len(KINDS)
    executor = EmbeddedExecutor(open_engine(target, dtype, kv_tokens=room))
    texts = [Text(kind, prompt, seed, tokens) for seed, (prompt, kind) in enumerate(itertools.product(asked, KINDS))]
    Decoding(executor, texts, random.Random(1)).plainly()
    ends = set(executor.model.eos_token_ids)
    for text in texts:
        text.plain = list(itertools.takewhile(lambda token: token not in ends, text.plain))
    return [text for text in texts if text.plain]


def rows(texts: list[Text]) -> Iterator[Row]:
    for (name, knobs), kind in itertools.product(variations(), KINDS):
        counts = Counts()
        with doubting(knobs.doubt):
            for text in texts:
                if text.kind == kind:
                    counts.read(text.prompt, text.plain, knobs)
        accepted = counts.tokens - counts.passes
        yield {
            "setting": name,
            "texts": kind,
            "tokens a pass": counts.tokens / counts.passes,
            "candidates a pass": counts.candidates / counts.passes,
            "accepted of candidates": accepted / counts.candidates if counts.candidates else None,
            "claimed": counts.claimed / accepted if accepted else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.knobs")
    parser.add_argument("--target", default=SHIPPED)
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    asked = [each for each in prompts(given.target, given.prompts, given.count) if len(each) <= LONGEST_PROMPT]
    texts = answers(given.target, given.dtype, asked, given.tokens)
    distinct = statistics.mean(distinct_share(text.plain) for text in texts)
    print(f"{len(texts)} texts, {sum(len(t.plain) for t in texts)} tokens, distinct 4-grams {distinct:.2f}", flush=True)
    named = [Path(word).name if word in given.prompts else word for word in sys.argv[1:]]
    write(f"knobs_{Path(given.target).name}", " ".join(["python -m benchmarks.knobs", *named]), list(rows(texts)))


if __name__ == "__main__":
    main()
