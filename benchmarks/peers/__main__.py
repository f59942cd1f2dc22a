"""Everybody in one run: tokens/s of each system beside a reference, on the same weights, prompts and cores.

usage: python -m benchmarks.peers [--target shipped|inflated|PARAMETERS] [--dtype float32|bfloat16] [--system NAME ...]
                                  [--reference NAME] [--at-once 1,6,16] [--repeats 3] [--tokens 48] [--threads N]
                                  [--again] [--list]

Each row is a system and a number of requests at once: its runs take turns with runs of the reference, and the ratio is
that of neighbouring runs, with a 95 % interval. The reference is llama.cpp without a draft unless another one is named:
ratios to that have a file of their own. Greedy; prompts of 64 tokens do not loop; a run has eight of them or more, so
many at a time, and its time includes them. A run is disturbed where others took more than 5 % of the cores' time or the
host more than 2 %; it is repeated, at most as often as there are repeats, and counted if nothing better came. `same` is
the share of prompts with the tokens of transformers in float32; a system that ends early counts the tokens it gave.
Transformers and ours run on the first GPU where there is one. `--target smollm2`, a checkpoint by others, answers chat
prompts instead: `benchmarks.peers.chat`.

Rows of `benchmarks/results/peers_TARGET_DTYPE[_GPU][_beside_NAME].json` are not measured again without --again, so a
run that was broken off goes on. Environments are made on first use (`benchmarks.peers.environments`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.peers import chat
from benchmarks.peers.chat_systems import chat_systems
from benchmarks.peers.disturbance import Seen, Watch
from benchmarks.peers.environments import PEERS, checkpoint
from benchmarks.peers.systems import SYSTEMS, Answer, Setting, System, Tokens
from benchmarks.processes import gpu
from benchmarks.prompts import held_out
from benchmarks.records import RESULTS, Row, in_a_name, write
from measurement.load.paired import paired_ratio
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.engine.cpu_cores import available_cores
from slipstream.errors import FailedPrecondition
from slipstream.tokenizer.vocabulary import load_tokenizer

REFERENCE = "llama.cpp"
EXPECTED = "transformers"
CHAT_TARGETS = ("smollm2",)
PROMPT_TOKENS = 64
FEWEST = 8
"""Prompts of a run, at least: what a draft model gains differs from prompt to prompt."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run."""

    tokens_per_s: float
    outputs: Tokens
    seen: Seen


@dataclass(frozen=True, slots=True)
class Prompts:
    prompts: Tokens
    expected: Tokens
    """Greedy continuations in float32."""

    def same(self, outputs: Tokens) -> float | None:
        """The share of outputs that are the expected ones; None where there are none."""
        pairs = list(zip(outputs, self.expected, strict=False))
        return sum(one == other for one, other in pairs) / len(pairs) if pairs else None


async def chosen(count: int, tokens: int) -> Prompts:
    """Held-out prompts whose greedy continuation does not loop, by the shipped target, which the inflated one equals.
    Kept in a file for the next run."""
    file = PEERS / f"prompts-{PROMPT_TOKENS}-{tokens}.json"
    found: list[tuple[list[int], list[int]]] = json.loads(file.read_text()) if file.exists() else []
    if len(found) < count:
        tokenizer = load_tokenizer(str(checkpoint("shipped")))
        async with AsyncExitStack() as stack:
            plain = await SYSTEMS[EXPECTED](stack, Setting("shipped", "float32", 1))
            seed, found = 0, []
            while len(found) < count:
                seed += 1
                some = [tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in held_out(16, seed=seed)]
                some = [prompt for prompt in some if len(prompt) == PROMPT_TOKENS]
                outputs = (await plain(some, tokens)).outputs
                found += [each for each in zip(some, outputs, strict=True) if distinct_share(each[1]) >= DISTINCT]
        PEERS.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    kept = found[:count]
    return Prompts([prompt for prompt, _ in kept], [output for _, output in kept])


async def sample(system: System, prompts: Tokens, at_once: int, tokens: int) -> Sample:
    """Continues all prompts, so many at a time."""
    watch, seconds, outputs = Watch(), 0.0, list[list[int]]()
    for first in range(0, len(prompts), at_once):
        answer: Answer = await system(prompts[first : first + at_once], tokens)
        seconds += answer.seconds
        outputs += answer.outputs
    given = sum(map(len, outputs)) or tokens * len(prompts)
    return Sample(given / seconds, outputs, watch.seen())


async def in_turn(
    reference: System, system: System, prompts: Tokens, at_once: int, tokens: int, repeats: int
) -> list[list[Sample]]:
    """Pairs of runs, every other with the system first; disturbed pairs are replaced by later ones while there are any
    left of twice the repeats. Undisturbed pairs first, then the least disturbed."""
    pairs: list[list[Sample]] = []
    for number in range(2 * repeats):
        order = (reference, system) if number % 2 == 0 else (system, reference)
        pair = [await sample(each, prompts, at_once, tokens) for each in order]
        pairs.append(pair if number % 2 == 0 else pair[::-1])
        if sum(not any(run.seen.disturbed for run in each) for each in pairs) == repeats:
            break
    return sorted(pairs, key=lambda each: max(run.seen.steal + run.seen.others for run in each))[:repeats]


def row(name: str, at_once: int, threads: int, pairs: list[list[Sample]], prompts: Prompts) -> Row:
    reference, own = zip(*pairs, strict=True)
    speeds, others = ([run.tokens_per_s for run in runs] for runs in (own, reference))
    ratio = paired_ratio(others, speeds)
    assert ratio is not None
    interval = None if ratio.low is None or ratio.high is None else f"{ratio.low:.2f}-{ratio.high:.2f}"
    runs = [run for pair in pairs for run in pair]
    return {
        "system": name,
        "at_once": at_once,
        "threads": threads,
        "tokens_per_s": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "reference_tokens_per_s": statistics.median(others),
        "x_reference": ratio.value,
        "interval": interval,
        "pairs": len(pairs),
        "disturbed_pairs": sum(any(run.seen.disturbed for run in pair) for pair in pairs),
        "steal_percent": statistics.fmean(run.seen.steal for run in runs),
        "others_percent": statistics.fmean(run.seen.others for run in runs),
        "same": prompts.same(own[-1].outputs),
        "load": os.getloadavg()[0],
    }


class Records:
    """Rows so far, on disk after each."""

    def __init__(self, name: str, command: str, again: bool) -> None:
        self._name, self._command = name, command
        file = RESULTS / f"{self._name}.json"
        self.rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() and not again else []

    def has(self, system: str, at_once: int) -> bool:
        return any((row["system"], row["at_once"]) == (system, at_once) for row in self.rows)

    def add(self, one: Row) -> None:
        self.rows.append(one)
        order = list(SYSTEMS)
        self.rows.sort(key=lambda row: (int(row["at_once"] or 0), order.index(str(row["system"]))))
        write(self._name, self._command, self.rows)


async def measure(asked: argparse.Namespace, setting: Setting, records: Records) -> None:
    prompts = await chosen(max(FEWEST, *asked.at_once), asked.tokens)
    wanted = {name: [size for size in asked.at_once if not records.has(name, size)] for name in asked.system}
    async with AsyncExitStack() as stack:
        reference = await SYSTEMS[asked.reference](stack, setting)
        await reference(prompts.prompts[:1], asked.tokens)
        for name, sizes in wanted.items():
            if not sizes:
                continue
            print(time.strftime("%H:%M:%S"), name, flush=True)
            try:
                async with AsyncExitStack() as own:
                    system = reference if name == asked.reference else await SYSTEMS[name](own, setting)
                    await system(prompts.prompts[:1], asked.tokens)
                    for size in sizes:
                        some = prompts.prompts[: size * max(1, FEWEST // size)]
                        pairs = await in_turn(reference, system, some, size, asked.tokens, asked.repeats)
                        records.add(row(name, size, setting.threads, pairs, prompts))
            except (FailedPrecondition, TimeoutError) as error:
                print(f"{name}: left out, {error or 'it did not start in time'}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument(
        "--target", default="inflated", help="shipped, inflated (300 M), parameters such as 3B, or smollm2."
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--system", action="append", help="Repeat for more; default: all.")
    parser.add_argument("--reference", choices=list(SYSTEMS), default=REFERENCE, help="What ratios are to.")
    parser.add_argument("--at-once", type=lambda word: [int(size) for size in word.split(",")], default=[1, 6, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="Of an answer; default: 48, of a chat 128 at most.")
    parser.add_argument("--threads", type=int, default=available_cores(), help="Of each system; default: all cores.")
    parser.add_argument("--again", action="store_true", help="Forget the rows of earlier runs.")
    parser.add_argument("--list", action="store_true", help="Print the systems' names.")
    chats = parser.add_argument_group("chat prompts, for smollm2 (benchmarks.peers.chat)")
    chats.add_argument(
        "--prompts",
        type=chat.prompts_folder,
        help="Folder of .jsonl files; each line is an object with `turns` (the first is asked), perhaps `category`.",
    )
    chats.add_argument("--short", action="store_true", help="A quarter of an hour: one prompt of each category.")
    chats.add_argument("--no-loops", action="store_true", help="Leave out prompts whose plain answer repeats itself.")
    chats.add_argument("--of-each", type=int, default=4, help="Prompts of each category.")
    chats.add_argument("--temperature", type=float, default=0.0)
    chats.add_argument("--tries", type=int, default=2, help="Of a round that others disturb, at most.")
    chats.add_argument("--minutes", type=float, default=60.0, help="Of asking, at most.")
    asked = parser.parse_args()
    names = list(chat_systems(asked.target) if asked.target in CHAT_TARGETS else SYSTEMS)
    if unknown := set(asked.system or ()) - set(names):
        parser.error(f"no such system: {', '.join(unknown)}; choose from {', '.join(names)}.")
    asked.system = asked.system or names
    asked.tokens = asked.tokens or (128 if asked.target in CHAT_TARGETS else 48)
    return asked


def main() -> None:
    asked = arguments()
    if asked.list:
        print("\n".join(chat_systems(asked.target) if asked.target in CHAT_TARGETS else SYSTEMS))
        return
    if asked.target in CHAT_TARGETS:
        chat.main(asked)
        return
    setting = Setting(asked.target, asked.dtype, asked.threads)
    words = f"--target {asked.target} --dtype {asked.dtype} --repeats {asked.repeats} --tokens {asked.tokens}"
    words += f" --threads {asked.threads}"
    name = f"peers_{setting.target}_{setting.dtype}"
    if place := gpu():
        name += f"_{in_a_name(place)}"
    if asked.reference != REFERENCE:
        words += f' --reference "{asked.reference}"'
        name += f"_beside_{in_a_name(asked.reference)}"
    asyncio.run(measure(asked, setting, Records(name, f"python -m benchmarks.peers {words}", asked.again)))


if __name__ == "__main__":
    main()
