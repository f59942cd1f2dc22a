"""Prompts that were never trained on: pieces of held-out files of the Python standard library.

Small models fall into loops, and a loop accepts any draft: figures from looping text flatter everybody. So prompts are
kept by a rule that looks at the target's own plain greedy text alone: at least 0.6 of its 4-grams are distinct.
"""

from __future__ import annotations

import functools
import random
import secrets

from benchmarks.load_generator import run_load
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.v1 import gateway_pb2
from training.corpus import read_corpus


@functools.cache
def _documents() -> list[str]:
    return [document.text for document in read_corpus(None).held_out]


def held_out(count: int, *, characters: int = 400, seed: int = 0) -> list[str]:
    """`count` pieces of held-out files, each starting at a line of its own."""
    documents = [text for text in _documents() if len(text) > 2 * characters]
    chance = random.Random(seed)
    pieces = []
    for _ in range(count):
        text = chance.choice(documents)
        start = text.rfind("\n", 0, chance.randrange(len(text) - characters)) + 1
        pieces.append(text[start : start + characters])
    return pieces


async def without_loops(server: str, count: int, max_tokens: int) -> list[str]:
    """The first `count` held-out prompts that pass the rule. Asks the server for plain greedy text."""
    chosen: list[str] = []
    seed = 1
    while len(chosen) < count:
        prompts = held_out(16, seed=seed)
        plain = [request(prompt, max_tokens, speculate=False) for prompt in prompts]
        load = await run_load(server, plain, 8)
        kept = [c for c in zip(prompts, load.completions, strict=True) if distinct_share(c[1].token_ids) >= DISTINCT]
        chosen += [prompt for prompt, _ in kept]
        seed += 1
    return chosen[:count]


def request(
    prompt: str, max_tokens: int, *, speculate: bool, temperature: float = 0.0, seed: int = 0, k: int | None = None
) -> gateway_pb2.GenerateRequest:
    """Under a salt of its own: what one run computed of a prompt must not make the next one faster."""
    return gateway_pb2.GenerateRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(temperature=temperature, seed=seed),
        speculation=gateway_pb2.SpeculationOptions(disabled=not speculate, max_draft_tokens=k),
        cache_salt=secrets.token_hex(8),
    )
