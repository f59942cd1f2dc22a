"""Equality at scale: 200 prompts, greedy and T = 0.7 with seeds, speculation on and off, token by token, in fp32.

usage: python -m benchmarks.equality [PROMPTS]      (exit status 1 when a single token differs)
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.processes import MODELS, serving
from benchmarks.prompts import held_out, request
from slipstream.client.load_generator import LoadResult, run_load

TOKENS = 32
CONCURRENCY = 16


async def run(server: str, prompts: list[str], temperature: float, speculate: bool) -> LoadResult:
    requests = [
        request(prompt, TOKENS, speculate=speculate, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    return await run_load(server, requests, CONCURRENCY)


async def main(count: int) -> int:
    prompts = held_out(count)
    different = 0
    async with serving(str(MODELS / "target"), str(MODELS / "draft"), "float32") as server:
        for temperature in (0.0, 0.7):
            off, on = [await run(server, prompts, temperature, speculate) for speculate in (False, True)]
            pairs = zip(off.completions, on.completions, strict=True)
            unequal = sum(a.token_ids != b.token_ids for a, b in pairs)
            different += unequal
            print(
                f"T = {temperature}: {count - unequal} of {count} texts identical, {on.tokens} tokens, "
                f"{on.total('drafted'):.0f} drafted, {on.total('accepted'):.0f} accepted, "
                f"{on.tokens / on.total('rounds'):.2f} tokens a pass (off: {off.tokens / off.total('rounds'):.2f})",
                flush=True,
            )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 200)))
