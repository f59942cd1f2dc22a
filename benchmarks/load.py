"""Speculation on and off in turn at 1 to 128 requests at once: it must never cost, and pay where there is room.

usage: python -m benchmarks.load [inflated|shipped|TARGET] [REPEATS] [--prompts FOLDER]

`inflated` is the shipped target at the price of 300 M parameters. Requests differ in prompt and seed; T = 0.7. As many
clients send a few requests each, one after the other: with one each, plain runs would end all together and speculative
ones in a tail of ever fewer sessions, which is slower whatever is done. With --prompts TARGET is served as `slipstream
serve` serves it by default, and answers the prompts of published sets (`benchmarks.peers.chats`) as chats at T = 0.3;
*CPU* is the ratio of CPU time a token without and with speculation, which other load on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.peers.chats import read, spread
from benchmarks.processes import ANYWHERE, INFLATED, MODELS, cpu_of_children_s, inflate, serving
from benchmarks.prompts import held_out, request
from benchmarks.records import Row, write
from slipstream.v1 import gateway_pb2

AT_ONCE, AT_ONCE_CHATS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 6, 8, 16)
REQUESTS_PER_CLIENT, MOST_REQUESTS = 6, 96
"""In a run each client sends so many, or fewer where all would send more together; at least one."""
CHAT_TOKENS, CHAT_CHARACTERS, CHATS_PER_CLIENT, LEAST_CHATS = 96, 1500, 3, 12
WARM_UP = 16
"""Clients whose chats are answered before anything is measured: trials find meanwhile what drafting costs."""
TARGETS = {"inflated": str(INFLATED), "shipped": str(MODELS / "target")}

Requests = Callable[[int, bool], list[gateway_pb2.GenerateRequest]]
"""What so many clients send in a run, with or without speculation."""


@dataclass(frozen=True, slots=True)
class Run:
    load: LoadResult
    cpu_s: float
    """Of all roles."""


def pieces(at_once: int, speculate: bool) -> list[gateway_pb2.GenerateRequest]:
    """Held-out pieces of source code, to be continued."""
    number = at_once * max(1, min(REQUESTS_PER_CLIENT, MOST_REQUESTS // at_once))
    prompts = held_out(number, characters=200, seed=3)
    tokens = 48 if at_once <= 16 else 24
    return [
        request(prompt, tokens, speculate=speculate, temperature=0.7, seed=seed) for seed, prompt in enumerate(prompts)
    ]


def chats(folder: Path) -> Requests:
    """Chats of published sets, categories in turn."""
    columns = [list(spread(some, MOST_REQUESTS)) for some in read(folder).values()]
    prompts = [each for each in chain.from_iterable(zip_longest(*columns)) if each and len(each) <= CHAT_CHARACTERS]

    def requests(at_once: int, speculate: bool) -> list[gateway_pb2.GenerateRequest]:
        number = max(LEAST_CHATS, CHATS_PER_CLIENT * at_once)
        return [chat(prompt, speculate, seed) for seed, prompt in enumerate(islice(cycle(prompts), number))]

    return requests


def chat(prompt: str, speculate: bool, seed: int) -> gateway_pb2.GenerateRequest:
    asked = request("", CHAT_TOKENS, speculate=speculate, temperature=0.3, seed=seed)
    asked.ignore_eos = False
    asked.chat.messages.add(role="user", content=prompt)
    return asked


async def run(server: str, asked: Sequence[gateway_pb2.GenerateRequest], at_once: int, parent: int) -> Run:
    """`parent` is the process whose children the roles are."""
    before = cpu_of_children_s(parent)
    load = await run_load(server, asked, at_once)
    return Run(load, cpu_of_children_s(parent) - before)


async def compare(server: str, at_once: int, requests: Requests, repeats: int, parent: int) -> Row:
    """Which of both comes first changes with each repeat."""
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for repeat in range(repeats):
        for speculate in (False, True) if repeat % 2 == 0 else (True, False):
            runs[speculate].append(await run(server, requests(at_once, speculate), at_once, parent))
    off, on = ([each.load.tokens_per_s for each in some] for some in (runs[False], runs[True]))
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    of_cpu = [
        (one.cpu_s / one.load.tokens) / (other.cpu_s / other.load.tokens)
        for one, other in zip(runs[False], runs[True], strict=True)
    ]
    last = runs[True][-1].load
    report = last.report()
    return {
        "at once": at_once,
        "off tok/s": statistics.median(off),
        "on tok/s": statistics.median(on),
        "on / off": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "CPU": statistics.median(of_cpu),
        "tokens / round": report["tokens_per_round"],
        "hit rate": report["hit_rate"],
        "bubble ms / round": last.total("bubble_s") / last.total("rounds") * 1e3,
    }


@asynccontextmanager
async def served_by_default(target: str) -> AsyncIterator[tuple[str, int]]:
    """The gateway's address and the process id of `slipstream serve`."""
    command = [sys.executable, "-m", "slipstream", "serve", "--target", target, "--listen", ANYWHERE, "--http", "off"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode().split()
        if line[:1] != ["ready"]:
            raise SystemExit(f"{target} is not served.")
        yield line[1].removeprefix("grpc="), process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def served_pair(kind: str) -> AsyncIterator[tuple[str, int]]:
    if kind == "inflated":
        inflate()
    async with serving(TARGETS[kind], str(MODELS / "draft")) as server:
        yield server, os.getpid()


async def main(target: str, repeats: int, prompts: Path | None) -> None:
    rows: list[Row] = []
    requests = chats(prompts) if prompts else pieces
    async with served_by_default(target) if prompts else served_pair(target) as (server, parent):
        await run_load(server, requests(WARM_UP, True) if prompts else pieces(1, True), 6)
        for at_once in AT_ONCE_CHATS if prompts else AT_ONCE:
            rows.append(await compare(server, at_once, requests, repeats, parent))
            print(rows[-1], flush=True)
    command = f"python -m benchmarks.load {target} {repeats}" + (" --prompts FOLDER" if prompts else "")
    write(f"load_{Path(target).name}", command, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load")
    parser.add_argument("target", nargs="?", default="inflated")
    parser.add_argument("repeats", nargs="?", type=int, default=3)
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args()
    if options.prompts is None and options.target not in TARGETS:
        parser.error(f"without --prompts the target is one of {', '.join(TARGETS)}")
    asyncio.run(main(options.target, options.repeats, options.prompts))
