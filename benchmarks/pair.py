"""The shipped pair, and the same pair inflated to 300 M parameters: acceptance, tokens for each pass, tokens/s.

usage: python -m benchmarks.pair [REPEATS]

Speculation off and on in turn, one request at a time and four at a time; medians over the repeats. Prompts by the rule
of `benchmarks.prompts`; sampled text beside greedy text.
"""

from __future__ import annotations

import asyncio
import statistics
import sys

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import INFLATED, MODELS, inflate, serving
from benchmarks.prompts import request, without_loops

PROMPTS = 4
TOKENS = 64
TEMPERATURES = (0.0, 0.7, 1.0)


async def compare(server: str, prompts: list[str], temperature: float, concurrency: int, repeats: int) -> None:
    runs: dict[bool, list[LoadResult]] = {False: [], True: []}
    for _ in range(repeats):
        for speculate, loads in runs.items():
            requests = [
                request(prompt, TOKENS, speculate=speculate, temperature=temperature, seed=seed)
                for seed, prompt in enumerate(prompts)
            ]
            loads.append(await run_load(server, requests, concurrency))
    off, on = ([load.tokens_per_s for load in loads] for loads in runs.values())
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    load = runs[True][0]
    drafted, accepted = load.total("drafted"), load.total("accepted")
    print(
        f"| {temperature} | {concurrency} | {accepted / max(1, drafted):.2f} "
        f"| {1 + accepted / max(1, load.total('rounds_with_drafts')):.2f} | {load.tokens / load.total('rounds'):.2f} "
        f"| {statistics.median(off):.1f} | {statistics.median(on):.1f} "
        f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |",
        flush=True,
    )


async def main(repeats: int) -> None:
    inflate()
    async with serving(str(MODELS / "target"), str(MODELS / "draft")) as server:
        prompts = await without_loops(server, PROMPTS, TOKENS)
    for target in (MODELS / "target", INFLATED):
        print(f"\ntarget {target.name}, {PROMPTS} prompts x {TOKENS} tokens, {repeats} repeats")
        print("| T | at once | acceptance rate | acceptance length | tokens / pass | off tok/s | on tok/s | on / off |")
        print("|---|---|---|---|---|---|---|---|")
        async with serving(str(target), str(MODELS / "draft")) as server:
            for concurrency in (1, 4):
                for temperature in TEMPERATURES:
                    await compare(server, prompts, temperature, concurrency, repeats)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 3))
