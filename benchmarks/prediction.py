"""What a prediction is worth: tokens for each pass and acceptance, by how much of it is right and which drafters help.

usage: python -m benchmarks.prediction [PROMPTS]

The shipped pair. The prediction is the target's own plain text, of which a share of the lines was changed: left out,
replaced by a line of another program, or with another word in it. Counts; those of the model drafter still depend on
what else the machine does, for its candidates count only if they come in time.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterable, Sequence

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import MODELS, serving
from benchmarks.prompts import held_out, request, without_loops
from benchmarks.records import Row, write

TOKENS = 96
CONCURRENCY = 2
CHANGED = (0.0, 0.1, 0.3, 1.0)
BOTH = ("model", "prediction")


def edited(pieces: Iterable[str], share: float, chance: random.Random, others: Sequence[str]) -> str:
    """A text of lines or sentences of which a share is changed. They are drawn one by one; the first one, which the
    output's beginning is looked for in, like any other."""
    lines: list[str] = []
    for line in pieces:
        if chance.random() >= share:
            lines.append(line)
            continue
        way = chance.choice(("drop", "replace", "reword"))
        if way == "replace":
            lines.append(chance.choice(others))
        elif way == "reword":
            words = line.split(" ")
            words[chance.randrange(len(words))] = "something"
            lines.append(" ".join(words).rstrip("\n") + "\n")
    return "".join(lines)


async def run(
    server: str, prompts: list[str], temperature: float, drafters: Sequence[str], predictions: Sequence[str]
) -> LoadResult:
    requests = [
        request(prompt, TOKENS, speculate=bool(drafters), temperature=temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    for one, prediction in zip(requests, predictions or [""] * len(requests), strict=True):
        one.speculation.drafters.extend(drafters)
        one.prediction.text = prediction
    return await run_load(server, requests, CONCURRENCY)


def row(temperature: float, drafters: Sequence[str], changed: float | None, load: LoadResult) -> Row:
    drafted, accepted = load.total("drafted"), load.total("accepted")
    predicted, refuted = (load.total(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
    return {
        "T": temperature,
        "drafters": " + ".join(drafters),
        "lines changed": None if changed is None else f"{changed:.0%}",
        "tokens a pass": load.tokens / load.total("rounds"),
        "acceptance rate": accepted / drafted if drafted else None,
        "accepted": int(accepted),
        "of the prediction": int(predicted),
        "prediction's acceptance": predicted / (predicted + refuted) if predicted + refuted else None,
        "hit rate": load.hit_rate,
        "same text": "yes",
    }


async def measure(server: str, prompts: list[str], temperature: float) -> list[Row]:
    plain = await run(server, prompts, temperature, (), ())
    texts = [completion.text for completion in plain.completions]
    chance = random.Random(1)
    others = [line + "\n" for piece in held_out(20, seed=99) for line in piece.splitlines() if line.strip()]
    cases: list[tuple[tuple[str, ...], float | None, list[str]]] = [(("model",), None, [])]
    for changed in CHANGED:
        predictions = [edited(text.splitlines(keepends=True), changed, chance, others) for text in texts]
        cases += [(("prediction",), changed, predictions), (BOTH, changed, predictions)]
    rows = []
    for drafters, share, predictions in cases:
        load = await run(server, prompts, temperature, drafters, predictions)
        measured = row(temperature, drafters, share, load)
        different = sum(a.token_ids != b.token_ids for a, b in zip(plain.completions, load.completions, strict=True))
        measured["same text"] = "yes" if not different else f"{different} of {len(prompts)} differ"
        rows.append(measured)
    return rows


async def main(count: int) -> None:
    async with serving(str(MODELS / "target"), str(MODELS / "draft"), "float32", BOTH) as server:
        prompts = await without_loops(server, count, TOKENS)
        rows = [row for temperature in (0.0, 0.7) for row in await measure(server, prompts, temperature)]
    write("prediction", f"python -m benchmarks.prediction {count}", rows)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 6))
