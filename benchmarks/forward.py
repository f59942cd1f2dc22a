"""One forward pass, on the lean code and on the library's: its time by tokens, and what depends on their number.

usage: python -m benchmarks.forward [THREADS]     (default: the cores that this process may use)

The shipped target, and the target inflated to 300 M parameters, after 256 tokens of context. Five ways, one
pass of each in changing order, medians: the library's model with its own cache; the engine on the library's forward;
the engine on the lean one; the same where KV blocks are scattered, so that every read is gathered; and the packed
linear layers alone. With one thread the time is CPU of that thread, so that other work on the cores is not in it, but
for the caches; else it is wall time.

The second table has attention alone, of one token and of eight to a context that is one run of KV rows, or scattered
(lower quartiles: the least disturbed). The third reads texts of held-out files in passes of one token and of eight, and
counts where the two differ.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.processes import INFLATED, MODELS, inflate
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from slipstream.engine.attention.reads import Read, visible
from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.engine import Engine
from slipstream.engine.kernels.attention import PagedLayer, StepParts
from slipstream.engine.kvcache.store import AttentionLayer, KVStore
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.linear import Linear
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition
from slipstream.tokenizer.vocabulary import load_tokenizer

CONTEXT = 256
SIZES = (1, 2, 4, 8, 16)
REPEATS = 15
BLOCK = 32
KV_TOKENS = 4096
TEXTS, LENGTH, TOGETHER = 32, 64, 8
MODELS_HERE = {"target, 11 M": MODELS / "target", "inflated, 300 M": INFLATED}
DTYPES = ("bfloat16", "float32")
Pass = Callable[[int], None]
"""A pass over this number of tokens."""


def engine_pass(engine: TorchEngine, scattered: bool = False) -> Pass:
    if scattered:
        singles = [engine.kv.begin_unshared(1) for _ in range(engine.kv.blocks_total)]
        for single in singles[::2]:
            engine.kv.close(single)
    sequence = engine.kv.begin_unshared(CONTEXT + max(SIZES))
    assert (sequence.rows is not None) == scattered
    return pass_behind(engine, sequence, CONTEXT)


def pass_behind(engine: Engine, sequence: KVSequence, context: int) -> Pass:
    """Fills the empty sequence with so many tokens; its passes are one token more and a chain of candidates."""
    fill(engine, sequence, context)

    def run(tokens: int) -> None:
        engine.forward([chain(sequence, tokens)])

    return run


def fill(engine: Engine, sequence: KVSequence, context: int) -> None:
    """Fills the empty sequence with so many tokens."""
    start = Segment(sequence, list(range(1, context + 1)), want_logits=False)
    engine.forward([start])
    engine.kv.keep(start, [])


def chain(sequence: KVSequence, tokens: int) -> Segment:
    """One token more and a chain of candidates, so many tokens together."""
    return Segment(sequence, [1], list(range(2, tokens + 1)), list(range(-1, tokens - 2)))


def plain_pass(model: Any) -> Pass:
    cache = DynamicCache(config=model.config)
    model(torch.arange(1, CONTEXT + 1, device=model.device)[None], past_key_values=cache, logits_to_keep=1)

    def run(tokens: int) -> None:
        model(torch.arange(1, tokens + 1, device=model.device)[None], past_key_values=cache)
        cache.crop(-tokens)

    return run


def linear_pass(model: Any) -> Pass:
    """Takes the model's weights."""
    layers: list[tuple[Linear, int]] = []
    for layer in model.model.layers:
        attention, feed = layer.self_attn, layer.mlp
        joined = ([attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj])
        for parts in (*joined, [feed.gate_proj, feed.up_proj], [feed.down_proj]):
            layers.append((Linear(parts), parts[0].in_features))
    layers.append((Linear([model.lm_head], keep=True), model.lm_head.in_features))
    inputs = {width: torch.randn(max(SIZES), width, dtype=model.dtype) for _, width in layers}

    def run(tokens: int) -> None:
        for layer, width in layers:
            layer(inputs[width][:tokens])

    return run


def ways(folder: Path, dtype: str) -> dict[str, Pass]:
    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    def engine(lean: bool) -> TorchEngine:
        return TorchEngine(load_checkpoint(str(folder), dtype, lean=lean), KV_TOKENS, block_size=BLOCK)

    return {
        "transformers": plain_pass(plain()),
        "engine, library's forward": engine_pass(engine(False)),
        "engine, lean": engine_pass(engine(True)),
        "lean, scattered KV": engine_pass(engine(True), scattered=True),
        "linear layers alone": linear_pass(plain()),
    }


@torch.inference_mode()
def compare(name: str, folder: Path, dtype: str, clock: Callable[[], float]) -> list[Row]:
    passes = ways(folder, dtype)
    order = random.Random(0)  # the one before decides what is in the caches
    rows: list[Row] = []
    for tokens in SIZES:
        taken: dict[str, list[float]] = {way: [] for way in passes}
        for repeat in range(-2, REPEATS):
            for way in order.sample(list(passes), len(passes)):
                begun = clock()
                passes[way](tokens)
                if repeat >= 0:
                    taken[way].append((clock() - begun) * 1e3)
        row: Row = {"model": name, "dtype": dtype, "tokens": tokens}
        row |= {f"{way}, ms": statistics.median(times) for way, times in taken.items()}
        quarters = statistics.quantiles(taken["engine, lean"], n=4)
        row["lean, middle half"] = f"{quarters[0]:.2f}-{quarters[2]:.2f}"
        ratios = [a / b for a, b in zip(taken["transformers"], taken["engine, lean"], strict=True)]
        row["transformers / lean"] = statistics.median(ratios)
        rows.append(row)
    return rows


def read(engine: TorchEngine, text: list[int], together: int) -> torch.Tensor:
    """fp32 [LENGTH, V]: the logits behind each of the text's last tokens, in passes of so many."""
    sequence = engine.kv.begin_unshared(len(text) + together)
    start = Segment(sequence, text[:-LENGTH], want_logits=False)
    engine.forward([start])
    engine.kv.keep(start, [])
    found = []
    for at in range(len(text) - LENGTH, len(text), together):
        nodes = text[at + 1 : at + together]
        segment = Segment(sequence, [text[at]], nodes, list(range(-1, len(nodes) - 1)))
        found.append(engine.forward([segment]).logits)
        engine.kv.keep(segment, list(range(len(nodes))))
    engine.kv.close(sequence)
    return torch.cat(found)


def dependence(name: str, folder: Path, dtype: str, lean: bool) -> Row:
    """How logits depend on the number of tokens in a pass."""
    engine = TorchEngine(load_checkpoint(str(folder), dtype, lean=lean), KV_TOKENS, block_size=BLOCK)
    tokenizer = load_tokenizer(str(folder))
    texts = [tokenizer.encode(text).ids[: 2 * LENGTH] for text in held_out(TEXTS)]
    pairs = [(read(engine, text, 1), read(engine, text, TOGETHER)) for text in texts if len(text) > LENGTH]
    single, several = (torch.cat(column) for column in zip(*pairs, strict=True))
    return {
        "model": name,
        "dtype": dtype,
        "forward": "lean" if lean else "library's",
        "rows": len(single),
        "same to the bit": int((single == several).all(dim=1).sum()),
        "other argmax": int((single.argmax(dim=1) != several.argmax(dim=1)).sum()),
        "largest difference of a logit": float((single - several).abs().max()),
    }


@torch.inference_mode()
def reading(name: str, folder: Path, context: int, clock: Callable[[], float]) -> Row:
    """Attention alone in all layers, of a token or eight behind a context: of one token by torch, and by the kernel, by
    whether the context's KV is a run of rows or scattered."""
    layers = load_checkpoint(str(folder), "bfloat16").layers
    store = KVStore(layers, 2 * (context + BLOCK))
    for keys, values in (store.read(layer.index) for layer in layers):
        keys.normal_()
        values.normal_()
    blocks = range(2 * (context // BLOCK + 1))
    sequences = {"run": KVSequence(list(blocks), BLOCK, length=context)}
    sequences["scattered"] = KVSequence(list(blocks[::2]), BLOCK, length=context)
    ways: dict[str, Callable[[], None]] = {"torch": partial(_by_torch, store, layers, Read(0, context + 1, None, None))}
    for kind, sequence in sequences.items():
        for tokens in (1, TOGETHER):
            ways[f"kernel, {kind}, {tokens} tokens"] = partial(_by_kernel, store, layers, chain(sequence, tokens))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(2 * REPEATS):
        for way, run in ways.items():
            begun = clock()
            run()
            taken[way].append((clock() - begun) * 1e3)
    quick = {f"{way}, ms": statistics.quantiles(times, n=4)[0] for way, times in taken.items()}
    row: Row = {"model": name, "context": context}
    return row | quick


def _by_torch(store: KVStore, layers: Several[AttentionLayer], read: Read) -> None:
    for layer in layers:
        query = torch.zeros(1, layer.heads, layer.group, layer.key_dim, dtype=layer.dtype)
        scaled_dot_product_attention(query, *visible(*store.read(layer.index), read))


def _by_kernel(store: KVStore, layers: Several[AttentionLayer], segment: Segment) -> None:
    sequence, tokens = segment.sequence, segment.tokens
    step = StepParts([segment], torch.tensor(sequence.pool_rows(sequence.length, sequence.length + tokens)))
    for layer in layers:
        kernel = store.attention(PagedLayer(layer.index, layer.heads * layer.group, None, layer.key_dim**-0.5))
        if kernel is None:
            raise FailedPrecondition("this machine has no compiled kernels")
        sizes = (
            (layer.heads * layer.group, layer.key_dim),
            (layer.heads, layer.key_dim),
            (layer.heads, layer.value_dim),
        )
        query, key, value = (torch.zeros(1, heads, tokens, dim, dtype=layer.dtype) for heads, dim in sizes)
        kernel((query, key, value), step)


def main(threads: int) -> None:
    torch.set_num_threads(threads)
    inflate()
    command = f"python -m benchmarks.forward {threads}"
    clock = time.thread_time if threads == 1 else time.perf_counter
    kinds = [(name, folder, dtype) for name, folder in MODELS_HERE.items() for dtype in DTYPES]
    rows = [row for kind in kinds for row in compare(*kind, clock)]
    write(f"forward_{threads}", command, rows)
    reads = [reading(*kind, context, clock) for kind in MODELS_HERE.items() for context in (256, 1024, 4096)]
    write(f"forward_reads_{threads}", command, reads)
    found = [
        dependence(name, MODELS_HERE[name], dtype, lean)
        for name in ("target, 11 M",)
        for dtype in DTYPES
        for lean in (False, True)
    ]
    write(f"forward_rows_{threads}", command, found)


if __name__ == "__main__":
    main(threads_for(int(sys.argv[1]) if sys.argv[1:] else 0))
