"""Drafters inside the verifier against the same drafters behind gRPC: tokens/s and accepted candidates.

usage: python -m benchmarks.local_sources [REPEATS [CORES]]

The target is the shipped one at the price of 100 M parameters: the shipped one itself decodes so fast on a laptop that
candidates hardly pay. One verifier, one gateway and two drafter processes serve throughout; a drafter that no request
names idles. Each repeat runs every arm once, in an order that turns from repeat to repeat, so that arms are compared
under the same load of the machine. `ratio` is the median of the repeats' ratios local / gRPC, with the lowest and
highest of them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks import records
from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import ANYWHERE, MODELS, inflated, started
from benchmarks.prompts import request, without_loops
from slipstream.v1 import gateway_pb2

PROMPTS = 4
TOKENS = 48
TEMPERATURES = (0.0, 0.8)
CONCURRENCY = (1,)
PARAMETERS = "100M"
METHODS = ("suffix", "model")
PLAIN = "none"
ARMS = (PLAIN, *(f"{method}-{place}" for method in METHODS for place in ("grpc", "local")))


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The gateway's address while every drafter serves in both places."""
    target, draft = str(inflated(PARAMETERS)), str(MODELS / "draft")
    async with AsyncExitStack() as stack:

        async def start(module: str, prefix: str, settings: Mapping[str, str]) -> str:
            prefixed = {prefix + name: value for name, value in {"LISTEN": ANYWHERE, **settings}.items()}
            return (await started(stack, module, prefixed))[1]

        drafters = dict[str, str]()
        for method in METHODS:
            drafters[f"{method}-grpc"] = await start("drafter_svc", "DRAFTER_", {"METHOD": method, "MODEL": draft})
            drafters[f"{method}-local"] = f"verifier:{method}"
        local = f"suffix,model={draft}"
        verifier = await start("verifier_svc", "VERIFIER_", {"MODEL": target, "LOCAL_DRAFTERS": local})
        named = ",".join(f"{name}={address}" for name, address in drafters.items())
        yield await start("gateway", "GATEWAY_", {"VERIFIERS": verifier, "DRAFTERS": named, "TOKENIZER": target})


def requests(prompts: Sequence[str], arm: str, temperature: float) -> list[gateway_pb2.GenerateRequest]:
    made = [
        request(prompt, TOKENS, speculate=arm != PLAIN, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    for each in made if arm != PLAIN else ():
        each.speculation.drafters.append(arm)
    return made


async def compare(
    server: str, prompts: Sequence[str], temperature: float, concurrency: int, repeats: int
) -> list[records.Row]:
    loads: dict[str, list[LoadResult]] = {arm: [] for arm in ARMS}
    for repeat in range(-1, repeats):  # the first one warms every arm up
        turn = repeat % len(ARMS)
        for arm in (*ARMS[turn:], *ARMS[:turn]):
            load = await run_load(server, requests(prompts, arm, temperature), concurrency)
            if repeat >= 0:
                loads[arm].append(load)
    return [_row(arm, temperature, concurrency, loads) for arm in ARMS]


def _row(arm: str, temperature: float, concurrency: int, loads: Mapping[str, list[LoadResult]]) -> records.Row:
    speeds = sorted(load.tokens_per_s for load in loads[arm])
    rounds = sum(load.total("rounds") for load in loads[arm])
    remote = loads[arm.replace("-local", "-grpc")]
    ratios = sorted(here.tokens_per_s / there.tokens_per_s for here, there in zip(loads[arm], remote, strict=True))
    return {
        "T": temperature,
        "at once": concurrency,
        "drafter": arm,
        "tokens/s": statistics.median(speeds),
        "lowest": speeds[0],
        "highest": speeds[-1],
        "drafted / round": sum(load.total("drafted") for load in loads[arm]) / rounds,
        "accepted / round": sum(load.total("accepted") for load in loads[arm]) / rounds,
        "ratio": f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if "local" in arm else None,
    }


async def main(repeats: int, cores: int) -> None:
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    rows: list[records.Row] = []
    async with serving() as server:
        prompts = await without_loops(server, PROMPTS, TOKENS)
        for concurrency in CONCURRENCY:
            for temperature in TEMPERATURES:
                rows += await compare(server, prompts, temperature, concurrency, repeats)
    name = "local_sources" if not cores else f"local_sources_{cores}_core"
    records.write(name, f"python -m benchmarks.local_sources {repeats} {cores}", rows)


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    asyncio.run(main(*(arguments + [7, 0][len(arguments) :])))
