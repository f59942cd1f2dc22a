"""Everybody on a checkpoint by others, SmolLM2-135M-Instruct, and on chat prompts of published sets.

usage: python -m benchmarks.peers --target smollm2 --prompts FOLDER [--short] [--of-each 4] [--tokens 128]
                                  [--at-once 1,6,16] [--temperature 0.8] [--system NAME ...] [--minutes 60]
                                  [--no-loops]

FOLDER has files of one JSON object a line with `turns`, the first of which is asked, and perhaps a `category`, as
Spec-Bench's `question.jsonl` (`benchmarks.peers.chats`). Prompts are rendered by the model's own template; answers
end where the model ends them. All systems are there at once and take turns on every prompt (`benchmarks.peers.turns`):
each figure is a ratio within such a round. `--short` takes at most a quarter of an hour on two quiet cores: one prompt
of each category, 48 tokens. Systems that cannot be had here are named and left out. With a temperature texts differ
between systems, and `same` says nothing. A greedy small model often repeats itself without end, which every lookup
guesses: `--no-loops` asks each prompt once first and leaves out those whose answer does.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.peers import chats, comparison, environments
from benchmarks.peers.chat_systems import EXPECTED, PLAIN, chat_systems
from benchmarks.peers.chats import Chat
from benchmarks.peers.systems import Setting, System
from benchmarks.peers.turns import Round, rounds
from benchmarks.processes import cpu, gpu
from benchmarks.records import in_a_name, write
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.errors import InvalidArgument, SlipstreamError

SHORT_S = 600.0
"""Of asking, behind the start of all systems, which takes up to five minutes."""
WARM_TOKENS = 32
ROUNDS = 4
"""At least, where as many requests at once use the prompts up."""
Record = Callable[[list[Round], list[str]], None]
"""Of rounds so far, by systems in this order."""


async def started(stack: AsyncExitStack, names: list[str], setting: Setting, warm: Chat) -> dict[str, System]:
    """Systems that answered a first prompt."""
    found = dict[str, System]()
    for name, start in chat_systems(setting.target).items():
        if name not in names:
            continue
        print(time.strftime("%H:%M:%S"), "starting", name, flush=True)
        try:
            system = await start(stack, setting)
            await system([warm.token_ids], WARM_TOKENS)
            found[name] = system
        except (SlipstreamError, TimeoutError, OSError) as error:
            print(f"{name}: left out, {error or 'it did not start in time'}", flush=True)
    if not PLAIN & set(found):
        raise InvalidArgument("no plain system is there to compare with; name one with --system.")
    return found


async def without_loops(systems: dict[str, System], prompts: list[Chat], tokens: int) -> list[Chat]:
    """The prompts whose answer by the last plain system does not loop."""
    name = [each for each in systems if each in PLAIN][-1]
    answers = [(await systems[name]([each.token_ids], tokens)).outputs[0] for each in prompts]
    kept = [each for each, text in zip(prompts, answers, strict=True) if distinct_share(text) >= DISTINCT]
    print(f"{len(prompts) - len(kept)} of {len(prompts)} prompts left out: {name} repeats itself", flush=True)
    return kept


async def measure(asked: argparse.Namespace, setting: Setting, minutes: float, record: Record) -> None:
    """Records what was found so far after each number of requests at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(environments.checkpoint(setting.target))
    texts = chats.read(asked.prompts)
    rounds_wanted = 1 if asked.short else ROUNDS
    of_each = max(asked.of_each, -(-rounds_wanted * max(asked.at_once) // len(texts)))
    prompts = chats.chats(texts, tokenizer, of_each)
    found = list[Round]()
    async with AsyncExitStack() as stack:
        systems = await started(stack, asked.system or list(chat_systems(setting.target)), setting, prompts[0])
        alone = prompts[: asked.of_each * len(texts)]
        if asked.no_loops:
            prompts = await without_loops(systems, prompts, asked.tokens)
            alone = [each for each in alone if each in prompts]
        for at_once in asked.at_once:
            some = alone if at_once == 1 else prompts
            limit_s = 60.0 * minutes / len(asked.at_once)
            found += await rounds(systems, some, at_once, asked.tokens, asked.tries, limit_s)
            record(found, list(systems))


def main(asked: argparse.Namespace) -> None:
    if asked.prompts is None:
        raise SystemExit("--target smollm2 answers chat prompts: name a folder of them with --prompts.")
    if asked.short:
        asked.of_each, asked.tokens, asked.tries = 1, min(asked.tokens, 48), 1
    minutes = min(asked.minutes, SHORT_S / 60.0) if asked.short else asked.minutes
    setting = Setting(asked.target, asked.dtype, asked.threads, asked.temperature, chat=True)
    words = f"--target {asked.target} --dtype {asked.dtype} --temperature {asked.temperature:g} --tokens {asked.tokens}"
    words += f" --threads {asked.threads} --of-each {asked.of_each} --prompts FOLDER"
    words += " --no-loops" if asked.no_loops else ""
    name = f"peers_{asked.target}_{asked.dtype}" + (f"_t{asked.temperature:g}" if asked.temperature else "")
    name += "_no_loops" if asked.no_loops else ""
    if place := gpu():
        name += f"_{in_a_name(place)}"
    command = f"python -m benchmarks.peers {words}"
    note = f"On {place or cpu()}; {asked.threads} threads for each system."

    def record(found: list[Round], systems: list[str]) -> None:
        write(name, command, comparison.summary(found, systems, PLAIN, EXPECTED), note)
        if categories := comparison.by_category(found, systems, PLAIN):
            write(f"{name}_by_category", command, categories, note)

    asyncio.run(measure(asked, setting, minutes, record))


def prompts_folder(word: str) -> Path:
    folder = Path(word)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{word} is no folder")
    return folder
