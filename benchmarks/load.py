"""Speculation on and off in turn at 1 to 128 requests at once: it must never cost, and pay where there is room.

usage: python -m benchmarks.load [inflated|shipped] [REPEATS]

`inflated` is the shipped target at the price of 300 M parameters. Requests differ in prompt and seed; T = 0.7. As many
clients send a few requests each, one after the other: with one each, plain runs would end all together and speculative
ones in a tail of ever fewer sessions, which is slower whatever is done.
"""

from __future__ import annotations

import asyncio
import statistics
import sys

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import INFLATED, MODELS, inflate, serving
from benchmarks.prompts import held_out, request
from benchmarks.records import Row, write
from slipstream.v1 import gateway_pb2

AT_ONCE = (1, 2, 4, 8, 16, 32, 64, 128)
REQUESTS_PER_CLIENT, MOST_REQUESTS = 6, 96
"""Of a run: each client sends so many, or fewer where all would send more together; at least one."""
TARGETS = {"inflated": str(INFLATED), "shipped": str(MODELS / "target")}


def requests(number: int, tokens: int, *, speculate: bool) -> list[gateway_pb2.GenerateRequest]:
    prompts = held_out(number, characters=200, seed=3)
    return [
        request(prompt, tokens, speculate=speculate, temperature=0.7, seed=seed) for seed, prompt in enumerate(prompts)
    ]


async def compare(server: str, at_once: int, tokens: int, repeats: int) -> Row:
    loads: dict[bool, list[LoadResult]] = {False: [], True: []}
    for _ in range(repeats):
        for speculate, some in loads.items():
            number = at_once * max(1, min(REQUESTS_PER_CLIENT, MOST_REQUESTS // at_once))
            some.append(await run_load(server, requests(number, tokens, speculate=speculate), at_once))
    off, on = ([load.tokens_per_s for load in some] for some in loads.values())
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    report = loads[True][-1].report()
    return {
        "at once": at_once,
        "off tok/s": statistics.median(off),
        "on tok/s": statistics.median(on),
        "on / off": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "tokens / round": report["tokens_per_round"],
        "hit rate": report["hit_rate"],
        "bubble ms / round": loads[True][-1].total("bubble_s") / loads[True][-1].total("rounds") * 1e3,
    }


async def main(kind: str, repeats: int) -> None:
    if kind == "inflated":
        inflate()
    rows: list[Row] = []
    async with serving(TARGETS[kind], str(MODELS / "draft")) as server:
        await run_load(server, requests(2, 16, speculate=True), 2)
        for at_once in AT_ONCE:
            tokens = 48 if at_once <= 16 else 24
            rows.append(await compare(server, at_once, tokens, repeats))
            print(rows[-1], flush=True)
    write(f"load_{kind}", f"python -m benchmarks.load {kind} {repeats}", rows)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "inflated", int(sys.argv[2]) if sys.argv[2:] else 3))
