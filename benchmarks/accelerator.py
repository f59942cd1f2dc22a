"""Steps of a big target on a GPU, by each way the engine has: against the time that reading its weights takes.

usage: python -m benchmarks.accelerator [DEVICE [PARAMETERS ...]]     (default: auto 1B 8B)

The shipped target inflated to so many parameters, in bf16. *Ordinary* is one attention call for each session;
*padded* one kernel for all, launched by Python; *captured* the same as a CUDA graph. *Host* is how long `forward`
keeps the thread: what is left of a step, the loop has for planning the next one. The floor is the bytes of the
weights over the bandwidth at which this device copies memory. Speculative: a chain of the shipped draft's greedy
guesses on the same device, one process, nothing at the same time, so less than what the whole system can do.

Medians. On a CPU it runs too, without graphs, and says nothing about a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.processes import MODELS, ROOT
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from slipstream.engine.cuda_graphs.flex import BLOCK_SIZE, FlexKernel, width
from slipstream.engine.cuda_graphs.graphs import Acceleration, CudaRecorder
from slipstream.engine.cuda_graphs.inputs import Buckets
from slipstream.engine.devices import activate, find_device
from slipstream.engine.engine import begin_unshared
from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.sampler import coupled_sampling
from slipstream.engine.segment import Segment, Sequence
from slipstream.engine.torch_engine import TorchEngine
from slipstream.tokenizer.vocabulary import load_tokenizer
from training.inflate.inflate import inflate
from training.inflate.proportions import InflateRequest

SIZES = {"1B": 1_000_000_000, "8B": 8_000_000_000}
Ways = dict[str, Acceleration | None]


@dataclass(frozen=True, slots=True)
class Setting:
    sessions: tuple[int, ...] = (1, 8, 32)
    nodes: tuple[int, ...] = (0, 4, 16)
    """Candidates of a session in a step that is timed."""
    context: int = 512
    steps: int = 50
    chain: int = 4
    """Guesses of a speculative round."""
    tokens: int = 64
    """Output tokens of one text."""
    copied: int = 1 << 28
    """Bytes that are copied to learn the device's bandwidth."""


def ways(checkpoint: Checkpoint) -> Ways:
    kernel, buckets = FlexKernel(), Buckets(width(checkpoint.layers))
    found: Ways = {"ordinary": None, "padded": Acceleration(kernel, None, buckets)}
    if checkpoint.device.type == "cuda":
        found["captured"] = Acceleration(kernel, CudaRecorder(checkpoint.device), buckets)
    return found


def bytes_per_s(device: torch.device, size: int) -> float:
    """What a copy of `size` bytes reads and writes in a second."""
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(lambda: target.copy_(source), lambda: int(target[-1].item()), 10)


def _median(run: Callable[[], object], wait: Callable[[], object], repeats: int) -> float:
    run()
    wait()
    seconds: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def open_sessions(engine: TorchEngine, count: int, context: int, room: int) -> list[Sequence]:
    sequences = [begin_unshared(engine, context + room) for _ in range(count)]
    for sequence in sequences:
        start = Segment(sequence, list(range(1, context + 1)), want_logits=False)
        engine.forward([start])
        engine.keep(start, [])
    return sequences


def step_s(engine: TorchEngine, segments: list[Segment], repeats: int) -> tuple[float, float]:
    """(seconds of a step, seconds that `forward` keeps its caller)."""
    host: list[float] = []
    whole: list[float] = []
    for _ in range(3 + repeats):
        begun = time.perf_counter()
        logits = engine.forward(segments).logits
        host.append(time.perf_counter() - begun)
        logits[0, 0].item()
        whole.append(time.perf_counter() - begun)
    return statistics.median(whole[3:]), statistics.median(host[3:])


def steps(name: str, checkpoint: Checkpoint, choices: Ways, setting: Setting) -> Iterator[Row]:
    """Times of steps, every way on the same weights."""
    weights = checkpoint.info.parameters * checkpoint.layers[0].dtype.itemsize
    floor = weights / bytes_per_s(checkpoint.device, setting.copied)
    for way, acceleration in choices.items():
        room = 1 + max(setting.nodes) + BLOCK_SIZE
        engine = TorchEngine(checkpoint, max(setting.sessions) * (setting.context + 2 * room), BLOCK_SIZE, acceleration)
        for count in setting.sessions:
            sequences = open_sessions(engine, count, setting.context, room)
            for nodes in setting.nodes:
                tree = [node - 1 if node % 4 else -1 for node in range(nodes)]
                segments = [Segment(sequence, [1], [2] * nodes, tree) for sequence in sequences]
                whole, host = step_s(engine, segments, setting.steps)
                yield {
                    "target": name,
                    "way": way,
                    "sessions": count,
                    "candidates": nodes,
                    "ms / step": whole * 1e3,
                    "host ms": host * 1e3,
                    "floor ms": floor * 1e3,
                    "floor / step": floor / whole,
                    "plain tok/s": count / whole if not nodes else None,
                }
            for sequence in sequences:
                engine.close(sequence)


@dataclass(slots=True)
class Writer:
    """Writes greedy text with one engine, or with guesses of another one."""

    target: TorchEngine
    draft: TorchEngine
    chain: int
    """0: plain decoding."""

    def write(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """(the text, seconds without the prompt's)."""
        room = len(prompt) + tokens + 2 * self.chain + 2
        target, draft = begin_unshared(self.target, room), begin_unshared(self.draft, room)
        text = [*prompt, *self._likeliest(self.target, Segment(target, prompt), [])]
        begun = time.perf_counter()
        while len(text) < len(prompt) + tokens:
            guesses = self._guess(draft, text)
            segment = Segment(target, text[target.length :], guesses, list(range(-1, len(guesses) - 1)))
            target_tokens = coupled_sampling.likeliest(self.target.forward([segment]).logits)
            right = next((at for at, guess in enumerate(guesses) if target_tokens[at] != guess), len(guesses))
            self.target.keep(segment, list(range(right)))
            text += target_tokens[: right + 1]
        taken = time.perf_counter() - begun
        self.target.close(target)
        self.draft.close(draft)
        return text[len(prompt) : len(prompt) + tokens], taken

    def _guess(self, sequence: Sequence, text: list[int]) -> list[int]:
        guesses: list[int] = []
        self.draft.rollback(sequence, min(sequence.length, len(text) - 1))
        pending = text[sequence.length :]
        for _ in range(self.chain):
            pending = self._likeliest(self.draft, Segment(sequence, pending), guesses)
        return guesses

    @staticmethod
    def _likeliest(engine: TorchEngine, segment: Segment, guesses: list[int]) -> list[int]:
        token = coupled_sampling.likeliest(engine.forward([segment]).logits)
        engine.keep(segment, [])
        guesses += token
        return token


def texts(name: str, target: TorchEngine, draft: TorchEngine, setting: Setting) -> list[Row]:
    """Tokens a second of one session, plain and with guesses."""
    tokenizer = load_tokenizer(str(MODELS / "target"))
    prompts = [tokenizer.encode(piece).ids for piece in held_out(4)]
    found: dict[int, list[tuple[list[int], float]]] = {
        chain: [Writer(target, draft, chain).write(prompt, setting.tokens) for prompt in prompts]
        for chain in (0, setting.chain)
    }
    same = sum(a[0] == b[0] for a, b in zip(*found.values(), strict=True))
    return [
        {
            "target": name,
            "guesses": chain,
            "tok/s": setting.tokens * len(prompts) / sum(seconds for _, seconds in written),
            "texts as plain": f"{same} of {len(prompts)}" if chain else None,
        }
        for chain, written in found.items()
    ]


def fastest(checkpoint: Checkpoint) -> TorchEngine:
    return TorchEngine(checkpoint, 4096, BLOCK_SIZE, list(ways(checkpoint).values())[-1])


def inflated(parameters: int, out: Path) -> str:
    inflate(MODELS / "target", out, InflateRequest(parameters))
    return str(out)


def main(device_name: str, sizes: list[str]) -> None:
    device = find_device(device_name)
    activate(device)
    torch.set_num_threads(1)
    rows: list[Row] = []
    written: list[Row] = []
    draft = fastest(load_checkpoint(str(MODELS / "draft"), "bfloat16", str(device)))
    for size in sizes:
        folder = inflated(SIZES[size], ROOT / ".cache" / f"target-{size.lower()}")
        target = load_checkpoint(folder, "bfloat16", str(device))
        rows += steps(size, target, ways(target), Setting())
        written += texts(size, fastest(target), draft, Setting())
    command = f"python -m benchmarks.accelerator {device_name} {' '.join(sizes)}"
    write("accelerator_steps", command, rows)
    write("accelerator_texts", command, written)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "auto", sys.argv[2:] or list(SIZES))
