"""Tokens per second against the distance of the drafter: plain, ask-then-verify, push-ahead.

usage: python -m benchmarks.delay [emulated|real] [REPEATS]

One session at a time. `emulated`: a target of 20 ms a pass, flat to 16 tokens, and a drafter of 2 ms a pass that is
right in 0.8 of all places and has the truth among its next three guesses in 0.7 of the others, so that only the
system is measured. `real`: the shipped pair, the target inflated to 300 M parameters. Ask-then-verify is the same
verifier, waiting in each round for a whole chain of 4, or of 8 (`benchmarks.synchronous`). Real prompts are held out
and do not loop (`benchmarks.prompts`).
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import INFLATED, MODELS, Far, inflate, serving
from benchmarks.prompts import without_loops
from benchmarks.records import Row, write
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2

DELAYS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
EMULATED = (
    "emulated:vocabulary=4096&base_ms=20&flat=16",
    "emulated:vocabulary=4096&base_ms=2&acceptance=0.8&fanout=0.7",
)
NODES = 8


@dataclass(frozen=True, slots=True)
class Setting:
    target: str
    draft: str
    prompts: list[list[int]]
    tokens: int
    chains: tuple[int, ...]
    """Draft lengths k of ask-then-verify."""
    settings: Mapping[str, str] = field(default_factory=dict)

    def requests(self, nodes: int) -> list[gateway_pb2.GenerateRequest]:
        return [
            gateway_pb2.GenerateRequest(
                prompt_token_ids=gateway_pb2.TokenIds(token_ids=prompt),
                max_tokens=self.tokens,
                ignore_eos=True,
                sampling=gateway_pb2.SamplingOptions(temperature=0.0),
                speculation=gateway_pb2.SpeculationOptions(disabled=not nodes, max_draft_tokens=nodes),
                cache_salt=secrets.token_hex(8),  # what one run computed of a prompt must not make the next one faster
            )
            for prompt in self.prompts
        ]


async def measure(setting: Setting, delay_ms: float, repeats: int) -> list[Row]:
    """Plain and push-ahead in turn on one system, ask-then-verify on systems of its own."""
    loads: dict[str, list[LoadResult]] = {}
    async with Far(setting.target, setting.draft, delay_ms, settings=setting.settings).serving() as server:
        await run_load(server, setting.requests(NODES)[:1], 1)  # the links, and the paces that the waiting rule knows
        for _ in range(repeats):
            for mode, nodes in (("plain", 0), ("push-ahead", NODES)):
                loads.setdefault(mode, []).append(await run_load(server, setting.requests(nodes), 1))
    for nodes in setting.chains:
        chain = {"DRAFTER_MAX_NODES": str(nodes), "DRAFTER_WIDTH": "1", "DRAFTER_EXPAND": "1"} | dict(setting.settings)
        asking = Far(setting.target, setting.draft, delay_ms, "benchmarks.synchronous", chain)
        async with asking.serving() as server:
            await run_load(server, setting.requests(nodes)[:1], 1)
            for _ in range(repeats):
                mode = f"ask-then-verify {nodes}"
                loads.setdefault(mode, []).append(await run_load(server, setting.requests(nodes), 1))
    return [row(mode, delay_ms, some) for mode, some in loads.items()]


def row(mode: str, delay_ms: float, loads: list[LoadResult]) -> Row:
    speeds = sorted(load.tokens_per_s for load in loads)
    last = loads[-1]
    rounds = last.total("rounds")
    return {
        "mode": mode,
        "delay_ms": delay_ms,
        "tokens_per_s": statistics.median(speeds),
        "least": speeds[0],
        "most": speeds[-1],
        "tokens_per_round": last.tokens / rounds,
        "hit_rate": last.report()["hit_rate"],
        "bubble_ms_per_round": last.total("bubble_s") / rounds * 1e3,
    }


def emulated() -> Setting:
    # An emulated drafter reports calibrated probabilities.
    prompts = [[seed, 1, 2, 3] for seed in range(2)]
    return Setting(*EMULATED, prompts=prompts, tokens=200, chains=(4, 8), settings={"DRAFTER_SHARPNESS": "1"})


async def real() -> Setting:
    inflate()
    tokenizer = load_tokenizer(str(MODELS / "target"))
    async with serving(str(MODELS / "target"), str(MODELS / "draft")) as server:  # the same function
        texts = await without_loops(server, 3, 48)
    prompts = [tokenizer.encode(text).ids for text in texts]
    return Setting(str(INFLATED), str(MODELS / "draft"), prompts=prompts, tokens=48, chains=(4,))


async def main(kind: str, repeats: int) -> None:
    rows: list[Row] = []
    setting = emulated() if kind == "emulated" else await real()
    for delay_ms in DELAYS_MS:
        rows += await measure(setting, delay_ms, repeats)
        for result in rows[-2 - len(setting.chains) :]:
            print(result, flush=True)
    write(f"delay_{kind}", f"python -m benchmarks.delay {kind} {repeats}", rows)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "emulated", int(sys.argv[2]) if sys.argv[2:] else 3))
