"""`make demo`: the whole system on this machine, as three processes, on a model that costs what a real one costs.

The target is the shipped trained one, inflated on the fly to about 300 M parameters: a function-identical bigger model,
so that acceptance is that of the trained pair and the price of a pass is that of a big model. Then the shipped target
as it is, where a pass costs hardly more than a guess and speculation cannot pay much: the demo reports that.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2

ROOT = Path(__file__).resolve().parents[1]
INFLATED = ROOT / ".cache" / "target-300m"
PROMPT = '''class Queue:
    """A queue with a bounded number of items."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.items = []

    def put(self, item):'''
TOKENS = 96
REPEATS = 3
# Small models fall into loops, and a loop accepts any draft: this seed's text does not (95 % of its 4-grams differ).
SAMPLING = gateway_pb2.SamplingOptions(temperature=0.7, seed=2)

QUIET = {f"{role}_LOG_LEVEL": "error" for role in ("VERIFIER", "DRAFTER", "GATEWAY")}
"""Among lines for people there should be none for machines."""


@asynccontextmanager
async def serving(target: Path) -> AsyncIterator[str]:
    """The gateway's address, while every role runs as its own process."""
    command = [sys.executable, "-m", "slipstream", "serve", "--target", str(target)]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--no-draft-in-verifier"]  # three processes, to be seen apart
    command += ["--dtype", "float32"]  # in which both ways give the same tokens
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=QUIET | os.environ, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode().split()
        if line[:1] != ["ready"]:
            raise SystemExit("the system did not start; its own words stand above.")
        yield line[1].removeprefix("grpc=")
    finally:
        process.terminate()
        await process.wait()


def request(speculate: bool) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=PROMPT,
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=SAMPLING,
        speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
    )


def tokens_per_s(completion: Completion) -> float:
    """Decoding speed: the first token, which waits for the prompt, is not counted."""
    return 1.0 / (completion.tpot_s or float("inf"))


async def show(server: str) -> None:
    """Stream one completion, then time both ways in turn."""
    async with channel(server) as line:
        await complete(line, request(False))
        print("\n--- the text, as it streams " + "-" * 52 + f"\n{PROMPT}", end="")
        shown = await complete(line, request(True), lambda text: print(text, end="", flush=True))
        print(f" [...{TOKENS} tokens]\n" + "-" * 80)
        plain, speculative = [], []
        for _ in range(REPEATS):
            plain.append(await complete(line, request(False)))
            speculative.append(await complete(line, request(True)))
    report(shown, plain, speculative)


def report(shown: Completion, plain: list[Completion], speculative: list[Completion]) -> None:
    stats, tokens = shown.finished.statistics, len(shown.token_ids)
    off, on = (statistics.median(map(tokens_per_s, runs)) for runs in (plain, speculative))
    same = all(run.token_ids == plain[0].token_ids for run in [*plain, *speculative])
    print(
        f"{tokens} tokens in {stats.rounds} rounds: {tokens / stats.rounds:.2f} a target pass\n"
        f"acceptance rate {stats.accepted / max(1, stats.drafted):.2f} ({stats.accepted} of {stats.drafted} drafted)"
        f", acceptance length {1 + stats.accepted / max(1, stats.rounds_with_drafts):.2f}\n"
        f"speculation off {off:6.1f} tokens/s   on {on:6.1f} tokens/s   ratio {on / off:.2f}"
        f"   (median of {REPEATS}, in turn)\n"
        f"the text with and without speculation is {'the same' if same else 'NOT THE SAME: that is a bug'}"
    )


async def main() -> None:
    print("Inflating the shipped target to about 300 M parameters: the same function at the price of a big model.")
    inflate = [sys.executable, "-m", "slipstream", "inflate", str(ROOT / "models/target"), str(INFLATED)]
    subprocess.run([*inflate, "--parameters", "300M"], check=True, cwd=ROOT)
    print("\nStarting verifier, drafter and gateway: target inflated, drafter as shipped.")
    async with serving(INFLATED) as server:
        await show(server)
    print("\nAgain with the shipped target itself, which is hardly dearer than its drafter:")
    async with serving(ROOT / "models/target") as server:
        await show(server)


if __name__ == "__main__":
    asyncio.run(main())
