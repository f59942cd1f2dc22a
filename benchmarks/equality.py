"""Equality at scale: 200 prompts, greedy and T = 0.7 with seeds, speculation on and off, token by token.

usage: python -m benchmarks.equality [PROMPTS [DTYPE [ENGINE]]]      (exit status 1 when a single token differs)

In float32, where every text is promised, on the embedded engine unless said otherwise. The last figure is of plain
decoding twice, with 16 and with 3 at once: what differs there is the arithmetic of batches, not speculation.
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import MODELS, serving
from benchmarks.prompts import held_out, request

TOKENS = 32
CONCURRENCY = 16
FEWER = 3


async def run(server: str, prompts: list[str], temperature: float, speculate: bool, at_once: int) -> LoadResult:
    requests = [
        request(prompt, TOKENS, speculate=speculate, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    return await run_load(server, requests, at_once)


def differing(one: LoadResult, other: LoadResult) -> int:
    pairs = zip(one.completions, other.completions, strict=True)
    return sum(a.token_ids != b.token_ids for a, b in pairs)


async def main(count: int, dtype: str, engine: str) -> int:
    prompts = held_out(count)
    different = 0
    async with serving(str(MODELS / "target"), str(MODELS / "draft"), dtype, engine=engine) as server:
        for temperature in (0.0, 0.7):
            off, on, few = [
                await run(server, prompts, temperature, speculate, at_once)
                for speculate, at_once in ((False, CONCURRENCY), (True, CONCURRENCY), (False, FEWER))
            ]
            unequal = differing(off, on)
            different += unequal
            print(
                f"T = {temperature}: {count - unequal} of {count} texts identical, {on.tokens} tokens, "
                f"{on.total('drafted'):.0f} drafted, {on.total('accepted'):.0f} accepted, "
                f"{on.tokens / on.total('rounds'):.2f} tokens a pass (off: {off.tokens / off.total('rounds'):.2f}); "
                f"{differing(off, few)} differ with {FEWER} instead of {CONCURRENCY} at once",
                flush=True,
            )
    return 1 if different else 0


if __name__ == "__main__":
    given = [*sys.argv[1:], *("200", "float32", "embedded")[len(sys.argv) - 1 :]]
    sys.exit(asyncio.run(main(int(given[0]), given[1], given[2])))
