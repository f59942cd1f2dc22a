"""What structured output costs and keeps of speculation: tokens for each pass by language, and what a mask takes.

usage: python -m benchmarks.structured [PROMPTS]

The shipped pair in fp32, with candidates and without. Counts; those of the drafter still depend on what else the
machine does, for its candidates count only if they come in time. A mask's time is that of the cursor along the texts
that came out, as the judge goes along them, on one thread and by the process's own clock.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import MODELS, serving
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.tokenizer.vocabulary import eos_token_ids, fingerprint, load_tokenizer
from slipstream.v1 import gateway_pb2

TOKENS = 96
CONCURRENCY = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["python", "rust", "haskell"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 24}, "city": {"type": "string", "maxLength": 24}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "languages", "address"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LANGUAGES: dict[str, StructuredOutput | None] = {
    "free": None,
    "JSON schema": StructuredOutput("json_schema", json.dumps(PERSON)),
    "lines of words": StructuredOutput("regex", r"(    [a-z_]{1,20}( [a-z_]{1,20}){0,6}\n)+"),
    "calls": StructuredOutput(
        "grammar", 'start: call+\ncall: NAME "(" (call | NAME) ("," call)? ")"\nNAME: /[a-z_]{1,12}/'
    ),
}


async def run(
    server: str, structure: StructuredOutput | None, prompts: list[str], temperature: float, on: bool
) -> LoadResult:
    requests = [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=TOKENS,
            structured_output=proto_conversion.structure_to_proto(structure),
            sampling=gateway_pb2.SamplingOptions(temperature=temperature, seed=seed),
            speculation=gateway_pb2.SpeculationOptions(disabled=not on),
        )
        for seed, prompt in enumerate(prompts)
    ]
    return await run_load(server, requests, CONCURRENCY)


def mask_us(grammars: Grammars, structure: StructuredOutput | None, texts: list[list[int]]) -> list[float]:
    """Microseconds of each mask along the texts, the first of a grammar left out: it belongs to compiling."""
    spent: list[float] = []
    if structure is None:
        return spent
    for text in texts:
        cursor = grammars.compile(structure).result().cursor()
        for length in range(1, len(text)):
            before = time.process_time()
            cursor.mask(text[:length])
            spent.append((time.process_time() - before) * 1e6)
    return spent


async def measure(server: str, grammars: Grammars, prompts: list[str], temperature: float) -> list[Row]:
    rows: list[Row] = []
    for name, structure in LANGUAGES.items():
        plain = await run(server, structure, prompts, temperature, on=False)
        load = await run(server, structure, prompts, temperature, on=True)
        texts = [completion.token_ids for completion in load.completions]
        different = sum(a != b.token_ids for a, b in zip(texts, plain.completions, strict=True))
        spent = sorted(mask_us(grammars, structure, texts))
        drafted = load.total("drafted")
        rows.append(
            {
                "T": temperature,
                "output": name,
                "tokens": load.tokens,
                "tokens a pass": load.tokens / load.total("rounds"),
                "acceptance rate": load.total("accepted") / drafted if drafted else None,
                "mask, us, median": statistics.median(spent) if spent else None,
                "99th of 100": spent[int(0.99 * len(spent))] if spent else None,
                "same text": "yes" if not different else f"{different} of {len(prompts)} differ",
            }
        )
    return rows


async def main(count: int) -> None:
    target = str(MODELS / "target")
    tokenizer = load_tokenizer(target)
    size, ends = tokenizer.get_vocab_size(with_added_tokens=True), eos_token_ids(target)
    grammars = Grammars(lambda: tokenizer, fingerprint(tokenizer), size, ends)
    async with serving(target, str(MODELS / "draft"), "float32", ("model",)) as server:
        prompts = held_out(count, seed=5)
        rows = [row for temperature in (0.0, 0.8) for row in await measure(server, grammars, prompts, temperature)]
    write("structured", f"python -m benchmarks.structured {count}", rows)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else 8))
