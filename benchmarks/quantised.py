"""Quantised draft models beside the full-precision one: bytes, time of a pass, and how often a guess is accepted.

usage: python -m benchmarks.quantised [PROMPTS]

The shipped draft, and the same inflated to 50 M parameters. Acceptance is counted offline along texts of the shipped
target (fp32; held-out prompts whose greedy text does not loop): the draft walks the text in passes of four tokens, as
it would guess along a tree's main branch, and its best guess at each position is the target's token or not. Greedy text
by the argmax, sampled text (T = 1) by the coupled rule's own noise. Times are CPU of passes on one thread (other work
on the cores is not in them) after 128 tokens of context: medians, all quantisers in turn.

An inflated draft computes the function of the shipped one among random numbers that cancel; its acceptance when
quantised shows nothing about a trained model of its size. Its times and bytes do.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

import torch

from benchmarks.processes import MODELS, ROOT
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.library_forward import LibraryForward
from slipstream.engine.models.packed_library import unpacked
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.segment import Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.tokenizer.vocabulary import load_tokenizer
from training.inflate.inflate import inflate
from training.inflate.proportions import InflateRequest

CHOICES = (("", "float32"), ("", "bfloat16"), ("int8", "bfloat16"), ("int4", "bfloat16"), ("int8-dynamic", "float32"))
SIZES = (1, 4, 16)
WALK = 4
TOKENS = 64
CONTEXT = 128
REPEATS = 60
KV_TOKENS = 16_384
BATCH = 16


@dataclass(frozen=True, slots=True)
class Text:
    prompt: list[int]
    tokens: list[int]
    greedy: bool
    seed: int


def write_texts(engine: TorchEngine, prompts: list[list[int]], greedy: bool) -> list[Text]:
    """The target's next tokens after each prompt, all prompts in one step."""
    sequences = [engine.kv.begin_unshared(len(prompt) + TOKENS) for prompt in prompts]
    pending, texts = prompts, [Text(prompt, [], greedy, seed) for seed, prompt in enumerate(prompts)]
    for _ in range(TOKENS):
        segments = [Segment(sequence, tokens) for sequence, tokens in zip(sequences, pending, strict=True)]
        logits = engine.forward(segments).logits
        places = [len(text.prompt) + len(text.tokens) for text in texts]
        tokens, _ = coupled_sampling.choose(logits, [greedy] * len(texts), [text.seed for text in texts], places)
        pending = [[token] for token in tokens.tolist()]
        for segment, text, token in zip(segments, texts, pending, strict=True):
            engine.kv.keep(segment, [])
            text.tokens.extend(token)
    for sequence in sequences:
        engine.kv.close(sequence)
    return texts


def target_texts(count: int) -> list[Text]:
    """Greedy and sampled texts after the same `count` prompts."""
    engine = TorchEngine(load_checkpoint(str(MODELS / "target"), "float32"), KV_TOKENS)
    tokenizer = load_tokenizer(str(MODELS / "target"))
    texts: list[Text] = []
    seed = 1
    while len(texts) < 2 * count:
        prompts = [tokenizer.encode(piece).ids for piece in held_out(BATCH, seed=seed)]
        greedy, sampled = (write_texts(engine, prompts, kind) for kind in (True, False))
        kept = [pair for pair in zip(greedy, sampled, strict=True) if distinct_share(pair[0].tokens) >= DISTINCT]
        texts += [text for pair in kept for text in pair]
        seed += 1
    return texts[: 2 * count]


def guesses(engine: TorchEngine, text: Text) -> list[int]:
    """The draft's best guess at every position of the text."""
    sequence = engine.kv.begin_unshared(len(text.prompt) + TOKENS + WALK)
    start = Segment(sequence, text.prompt[:-1], want_logits=False)
    engine.forward([start])
    engine.kv.keep(start, [])
    last, found = text.prompt[-1], []
    for at in range(0, TOKENS, WALK):
        nodes = text.tokens[at : at + WALK - 1]
        segment = Segment(sequence, [last], nodes, list(range(-1, len(nodes) - 1)))
        logits = engine.forward([segment]).logits
        places = [len(text.prompt) + at + row for row in range(len(logits))]
        best, _ = coupled_sampling.rank(logits, [text.greedy] * len(places), [text.seed] * len(places), places, 1)
        found += best[:, 0].tolist()
        engine.kv.keep(segment, list(range(len(nodes))))
        last = text.tokens[at + WALK - 1]
    engine.kv.close(sequence)
    return found


def pass_ms(engines: list[TorchEngine], tokens: int) -> list[float]:
    """CPU of each engine's passes of `tokens` tokens, the median; one pass of each in turn."""
    segments = []
    for engine in engines:
        sequence = engine.kv.begin_unshared(CONTEXT + tokens)
        start = Segment(sequence, list(range(1, CONTEXT + 1)))
        engine.forward([start])
        engine.kv.keep(start, [])
        nodes = list(range(2, tokens + 1))
        segments.append(Segment(sequence, [1], nodes, list(range(-1, len(nodes) - 1))))
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(REPEATS):
        for engine, segment, taken in zip(engines, segments, times, strict=True):
            begun = time.thread_time()
            engine.forward([segment])
            taken.append(time.thread_time() - begun)
    for engine, segment in zip(engines, segments, strict=True):
        engine.kv.close(segment.sequence)
    return [statistics.median(taken) * 1e3 for taken in times]


class Scale:
    """A file that only weighs what is written to it."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass


def stored_bytes(folder: str, quantisation: str, dtype: str) -> int:
    """Bytes of all weights, tied ones once, scales of quantisers included. Loaded for this alone: on a CPU with
    AVX512-BF16, bitsandbytes 0.50.2 unpacks its weights for this, and leaves their scales transposed.
    """
    with unpacked():
        forward = load_checkpoint(folder, dtype, quantisation=quantisation, lean=False).forward
    assert isinstance(forward, LibraryForward)
    scale = Scale()
    torch.save(forward.model.state_dict(), scale)  # type: ignore[arg-type]
    return scale.bytes


def compare(name: str, folder: str, texts: list[Text]) -> list[Row]:
    checkpoints = [load_checkpoint(folder, dtype, quantisation=quantisation) for quantisation, dtype in CHOICES]
    engines = [TorchEngine(checkpoint, KV_TOKENS) for checkpoint in checkpoints]
    times = dict(zip(SIZES, (pass_ms(engines, size) for size in SIZES), strict=True))
    truth = [text.tokens for text in texts]
    found = [[guesses(engine, text) for text in texts] for engine in engines]
    weights = [stored_bytes(folder, quantisation, dtype) for quantisation, dtype in CHOICES]
    rows: list[Row] = []
    for index, engine in enumerate(engines):
        row: Row = {"draft": name, "weights/activations": engine.model.dtype, "MB": weights[index] / 1e6}
        row |= {f"ms CPU, {size} token{'s' * (size > 1)}": times[size][index] for size in SIZES}
        for label, kind in (("greedy", True), ("T = 1", False)):
            own = [place for place, text in enumerate(texts) if text.greedy == kind]
            row[f"as fp32, {label}"] = share(found[index], found[0], own)
            row[f"accepted, {label}"] = share(found[index], truth, own)
        rows.append(row)
    return rows


def share(left: list[list[int]], right: list[list[int]], places: list[int]) -> float:
    """Share of the tokens at these places that are equal."""
    pairs = [pair for place in places for pair in zip(left[place], right[place], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def main(count: int) -> None:
    torch.set_num_threads(1)
    big = ROOT / ".cache" / "draft-50m"
    shape = inflate(MODELS / "draft", big, InflateRequest(50_000_000))
    texts = target_texts(count)
    rows = compare("shipped, 1 M", str(MODELS / "draft"), texts)
    rows += compare(f"inflated, {shape.parameters() / 1e6:.0f} M", str(big), texts)
    write("quantised", f"python -m benchmarks.quantised {count}", rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 48)
