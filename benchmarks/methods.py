"""Every drafting method, and merged ones, on one target with the same prompts and the same candidates a pass.

usage: python -m benchmarks.methods [PROMPTS [TOKENS [NODES]]]

All methods run inside one verifier, so that none has a network; requests name the sources of an arm. Passes of the
target are stretched to `benchmarks.ablation.PASS_S`, whatever they hold, as those of a big model nearly are, and every
step takes up to NODES candidates, so tokens a pass compare what methods know. `CPU ms a token` is what this process
took for target, drafting and client: other programs on the machine hardly change it. Heads are taken from
`models/METHOD` where there are any.

Slices: `code` and `prose` are held-out files of the Python standard library and their docstrings, whose greedy texts do
not loop (`benchmarks.prompts`); `JSON` are made records; in `in prompt` the answer stands in the prompt. Text that
repeats itself is what lookups live on, and the last two are of that kind.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from benchmarks.ablation import stretched
from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import ANYWHERE, MODELS, started
from benchmarks.prompts import held_out, request
from benchmarks.records import Row, write
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.proposers.registry import IN_VERIFIER, METHODS
from training.corpus import read_corpus
from verifier_svc.config import VerifierConfig
from verifier_svc.verifier import VerifierParts, running

PLAIN = "none"
LOOKUPS = ("suffix", "lookahead")
HEADS = ("medusa", "eagle")
CHARACTERS = 400
NAMES = ("Ada", "Alan", "Grace", "Edsger", "Barbara", "Donald", "Frances", "Niklaus")


def folders() -> dict[str, str]:
    """Model or heads of each method that needs some and has them."""
    found = {"model": MODELS / "draft"} | {name: MODELS / name for name in HEADS}
    return {name: str(folder) for name, folder in found.items() if folder.is_dir()}


def arms(known: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Plain decoding, every method, and each one with a model or heads merged with each lookup."""
    alone: list[tuple[str, ...]] = [(), *((name,) for name in (*LOOKUPS, *known))]
    return [*alone, *((name, lookup) for name in known for lookup in LOOKUPS), ("suffix", "lookahead")]


def docstrings(count: int, seed: int) -> list[str]:
    texts = []
    for document in read_corpus(None).held_out:
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            continue
        nodes = [each for each in ast.walk(tree) if isinstance(each, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        texts += [found for each in nodes if (found := ast.get_docstring(each)) and len(found) > CHARACTERS]
    return [f'"""{text[:CHARACTERS]}' for text in random.Random(seed).sample(sorted(texts), min(count, len(texts)))]


def records(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        rows = [
            {"id": number, "name": chance.choice(NAMES), "score": chance.randrange(100), "ok": chance.random() < 0.5}
            for number in range(20)
        ]
        made.append(json.dumps(rows)[: CHARACTERS // 2])
    return made


def repeated(count: int, seed: int) -> list[str]:
    pieces = held_out(count, characters=CHARACTERS, seed=seed)
    return [f"{piece}\n\n# Again:\n{piece[: CHARACTERS // 5]}" for piece in pieces]


async def prompts(server: str, count: int, tokens: int) -> dict[str, list[str]]:
    """`count` prompts of each slice."""
    offered = {"code": held_out(6 * count, characters=CHARACTERS, seed=1), "prose": docstrings(6 * count, 1)}
    chosen: dict[str, list[str]] = {}
    for name, texts in offered.items():
        load = await run_load(server, [request(text, tokens, speculate=False) for text in texts], 4)
        shares = [distinct_share(each.token_ids) for each in load.completions]
        kept = [text for text, share in zip(texts, shares, strict=True) if share >= DISTINCT]
        chosen[name] = kept[:count]
    return chosen | {"JSON": records(count, 1), "in prompt": repeated(count, 2)}


async def run(server: str, texts: Sequence[str], arm: Sequence[str], tokens: int, nodes: int) -> LoadResult:
    made = [request(text, tokens, speculate=bool(arm), k=nodes) for text in texts]
    for each in made:
        each.speculation.drafters.extend(arm)
    return await run_load(server, made, 1)


def per_pass(loads: Sequence[LoadResult]) -> float:
    return sum(load.tokens for load in loads) / sum(load.total("rounds") for load in loads)


async def main(count: int, tokens: int, nodes: int) -> None:
    known = folders()
    missing = [name for name in HEADS if name not in known]
    print("without heads, so left out: " + (", ".join(missing) or "none"), flush=True)
    local = [*LOOKUPS, *(f"{name}={folder}" for name, folder in known.items())]
    target = str(MODELS / "target")
    async with AsyncExitStack() as stack:
        config = VerifierConfig(
            model=target, listen=ANYWHERE, grace_s=0.0, local_drafters=tuple(local), always_speculate=True
        )
        verifier = await stack.enter_async_context(running(config, VerifierParts(opening=stretched)))
        names = {name: IN_VERIFIER + name for name in (*LOOKUPS, *known)}
        _, server = await started(
            stack,
            "gateway",
            {
                "GATEWAY_LISTEN": ANYWHERE,
                "GATEWAY_VERIFIERS": verifier.address,
                "GATEWAY_DRAFTERS": ",".join(f"{name}={place}" for name, place in names.items()),
                "GATEWAY_TOKENIZER": target,
                "GATEWAY_MAX_DRAFT_TOKENS": str(nodes),
            },
        )
        slices = await prompts(server, count, tokens)
        rows: list[Row] = []
        for arm in arms(known):
            await run(server, slices["code"][:1], arm, tokens, nodes)  # warms up
            began, loads = time.process_time(), dict[str, LoadResult]()
            for name, texts in slices.items():
                loads[name] = await run(server, texts, arm, tokens, nodes)
            used, every = time.process_time() - began, list(loads.values())
            rows.append(row(arm, loads, used / sum(load.tokens for load in every)))
            print(rows[-1], flush=True)
    write("methods", f"python -m benchmarks.methods {count} {tokens} {nodes}", rows)


def row(arm: Sequence[str], loads: Mapping[str, LoadResult], cpu_per_token_s: float) -> Row:
    every = list(loads.values())
    drafted, accepted, with_drafts = (
        sum(load.total(name) for load in every) for name in ("drafted", "accepted", "rounds_with_drafts")
    )
    hits = sum(load.total("hits") for load in every)
    return {
        "sources": " + ".join(arm) or PLAIN,
        **{f"tokens / pass, {name}": per_pass([load]) for name, load in loads.items()},
        "tokens / pass": per_pass(every),
        "acceptance length": 1.0 + accepted / with_drafts if with_drafts else None,
        "accepted": accepted / drafted if drafted else None,
        "hit rate": hits / sum(load.total("rounds") for load in every) if drafted else None,
        "tokens/s": sum(load.tokens for load in every) / sum(load.wall_s for load in every),
        "CPU ms a token": 1e3 * cpu_per_token_s,
        "weights, MB": sum(_weights(name) for name in arm) / 1e6,
    }


def _weights(method: str) -> int:
    """Bytes of a method's own model or heads."""
    if not METHODS[method].needs_model:
        return 0
    return sum(file.stat().st_size for file in (MODELS / method.replace("model", "draft")).glob("*.safetensors"))


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:4]]
    asyncio.run(main(*given, *(4, 64, 16)[len(given) :]))
