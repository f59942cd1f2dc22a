"""A row of attention in fp32 on a CPU has the same bits in every pass, by kernels and by torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.attention.batch_invariant import BLOCK, MOST_NODES, least_rows
from slipstream.engine.attention.plan import AttentionPlan
from slipstream.engine.attention.reads import Read, visible
from slipstream.engine.kernels import attention
from slipstream.engine.kernels import compiled as compiled_kernels
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.kvcache.store import AttentionLayer, KVStore
from slipstream.engine.segment import KVSequence, Segment
from tests.support.kernels import kernels
from tests.support.packed_passes import prompt

CPU = torch.device("cpu")
DIM, TOKENS, LENGTHS = 32, 50, (9, 2 * BLOCK + 20, 3 * BLOCK + 5)


@dataclass(eq=False)
class OneLayer:
    """Attention alone: the states of a token are a function of its position and its number."""

    heads: int = 2
    group: int = 3
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dim: int = DIM
    layer_idx: int = 0
    extras: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        layer = AttentionLayer(0, 0, self.heads, self.dim, self.dim, self.window, torch.float32, CPU, self.group)
        self.store = KVStore([layer], 200 * 16)
        self.kv = KVCache(BlockPool(200, 16), 600, self.store.queue_moves)
        chance = torch.Generator().manual_seed(0)
        shape = (600, TOKENS, self.heads * (self.group + 2), self.dim)
        self.states = torch.randn(shape, generator=chance)
        sinks = torch.randn(self.heads * self.group, generator=chance) if self.sinks else None
        self.extras = {"sliding_window": self.window, "softcap": self.softcap, "s_aux": sinks}

    def opened(self, tokens: int) -> KVSequence:
        return self.kv.begin_unshared(tokens)

    def fragment(self) -> list[KVSequence]:
        """Takes every second block."""
        singles = [self.opened(1) for _ in range(self.kv.blocks_total)]
        for single in singles[::2]:
            self.kv.close(single)
        return singles[1::2]

    def forward(self, segments: list[Segment]) -> torch.Tensor:
        """[tokens, heads, dim]"""
        for segment in segments:
            segment.sequence.ahead = segment.tokens
        self.store.apply_moves()
        plan = AttentionPlan(segments, self.store, CPU, 600)
        states = self.states[plan.positions[0], plan.tokens[0]].transpose(0, 1).unsqueeze(0)
        query, key, value = states.split((self.heads * self.group, self.heads, self.heads), dim=1)
        return plan.attend(self, (query, key, value), self.extras)[0]


@pytest.fixture(params=["AVX2", "AVX-512", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels compute."""
    found = None if request.param == "torch" else kernels(compiled, request.param == "AVX-512")
    monkeypatch.setattr(attention, "find_kernels", lambda: found)
    return str(request.param)


def promised(layer: AttentionLayer | OneLayer, way: str) -> bool:
    """Torch's products have no fixed order on some machines; kernels have."""
    dims = (layer.dim, layer.dim) if isinstance(layer, OneLayer) else (layer.key_dim, layer.value_dim)
    return way != "torch" or least_rows(layer.heads, *dims) is not None


LAYERS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "a KV head for each": {"heads": 4, "group": 1},
    "many rows": {"heads": 1, "group": 8},
    "small heads": {"heads": 1, "group": 2, "dim": 16},
    "heads of an odd size": {"dim": 40},
    "window": {"window": 40},
    "window of blocks": {"window": BLOCK + 3},
    "soft-capped": {"softcap": 2.0},
    "sinks": {"sinks": True, "window": 150},
}


def texts(layer: OneLayer) -> list[list[int]]:
    return [[token % TOKENS for token in prompt(length, length)] for length in LENGTHS]


def one_by_one(layer: OneLayer, text: list[int]) -> torch.Tensor:
    sequence, rows = layer.opened(len(text)), []
    for token in text:
        segment = Segment(sequence, [token])
        rows.append(layer.forward([segment])[0])
        layer.kv.keep(segment, [])
    layer.kv.close(sequence)
    return torch.stack(rows)


def tree(chance: random.Random, rest: list[int], most: int) -> tuple[list[int], list[int], list[int]]:
    """Nodes, their parents, and those on the way that the text takes."""
    nodes: list[int] = []
    parents: list[int] = []
    way: list[int] = []
    for node in range(chance.randrange(most)):
        right = chance.random() < 0.5 and len(way) < len(rest)
        nodes.append(rest[len(way)] if right else chance.randrange(TOKENS))
        parents.append((way[-1] if way else -1) if right else chance.randrange(-1, node))
        if right:
            way.append(node)
    return nodes, parents, way


def segment_of(chance: random.Random, text: list[int], sequence: KVSequence) -> tuple[Segment, list[int]]:
    at, count = sequence.length, chance.choice((1, 1, 1, 2, 7, 90))
    pending = text[at : at + count]
    rest = text[at + len(pending) :]
    nodes, parents, way = tree(chance, rest, chance.choice((1, 4, 12, MOST_NODES)))
    return Segment(sequence, pending, nodes, parents), way


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if (number + seed) % 2 == 0 else pytest.mark.slow)
        for number, name in enumerate(LAYERS)
        for seed in range(2)
    ],
)
@torch.inference_mode()
def test_rows_have_the_same_bits_in_every_pass(name: str, seed: int, way: str) -> None:
    """Whatever else is in the pass, wherever the prompt is cut, on every branch, in scattered blocks: in the short form
    those of every other layer."""
    layer = OneLayer(**LAYERS[name])
    if not promised(layer, way):
        pytest.skip("this machine's products depend on their shape")
    chance = random.Random(seed)
    expected = [one_by_one(layer, text) for text in texts(layer)]
    held = layer.fragment() if seed else []
    running = [
        (layer.opened(len(text) + MOST_NODES), text, rows) for text, rows in zip(texts(layer), expected, strict=True)
    ]
    compared = 0
    while any(sequence.length < len(text) for sequence, text, _ in running):
        chosen = [each for each in running if each[0].length < len(each[1]) and chance.random() < 0.8]
        steps = [(*segment_of(chance, text, sequence), rows) for sequence, text, rows in chosen]
        found = layer.forward([segment for segment, _, _ in steps]) if steps else torch.empty(0)
        for segment, right_way, rows in steps:
            own, found = found[: segment.tokens], found[segment.tokens :]
            at, pending = segment.sequence.length, len(segment.pending)
            right = [*range(pending), *(pending + node for node in right_way)]
            assert torch.equal(own[right], rows[at : at + len(right)])
            compared += len(right)
            layer.kv.keep(segment, right_way)
    assert compared == sum(LENGTHS)
    for sequence in (*held, *(sequence for sequence, _, _ in running)):
        layer.kv.close(sequence)


@torch.inference_mode()
def test_a_long_prompt_is_computed_in_steps(way: str) -> None:
    """Rows of a pass that is too long for one product, with and without the rest of the prompt."""
    layer = OneLayer(group=8)
    text = [token % TOKENS for token in prompt(590, 1)]
    whole = Segment(layer.opened(len(text)), text)
    rows = layer.forward([whole])
    assert torch.allclose(rows, one_by_one(layer, text), atol=1e-5)
    if promised(layer, way):
        assert torch.equal(rows, one_by_one(layer, text))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_have_the_same_bits_in_every_pass(family: str, dtype: str, pairs: Any, opened: Any, way: str) -> None:
    """Through a whole model of the lean forward pass; in bf16 where kernels are installed, for products too."""
    if dtype == "bfloat16" and (way == "torch" or compiled_kernels.find_kernels() is None):
        pytest.skip("promised with kernels alone")
    pair = pairs(family, dtype)
    pair.engine._sequences._store._kernels.clear()
    pair.engine._sequences._store._all_kernels.clear()
    if not all(promised(layer, way) for layer in pair.engine._checkpoint.layers):
        pytest.skip("this machine's products depend on their shape")
    first, second, third = opened(pair, [30, 30, 30])
    for session in (first, second, third):
        session.tokens = first.tokens[:]
    for _ in first.tokens[:]:
        alone = pair.engine.forward([first.segment(1)]).logits
        first.keep(pair, [], bonus=None)
    for count in (11, 18):
        pair.engine.forward([second.segment(count), third.segment(2)])
        second.keep(pair, [], bonus=None)
        third.keep(pair, [], bonus=None)
    branches = pair.engine.forward([third.segment(5), second.segment(parents=[-1, 0, 0, -1])]).logits
    assert torch.equal(branches[0], alone[0])


@torch.inference_mode()
def test_reading_scattered_rows_allocates_little_more_than_they_take() -> None:
    """From a large pool, in whatever order blocks were taken again."""
    store = KVStore([AttentionLayer(0, 0, 4, DIM, DIM, None, torch.float32, torch.device("cpu"))], 20_000)
    pool = store.read(0)
    for each in pool:
        each.normal_()
    rows = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))[:256]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = visible(*pool, Read(0, len(rows), rows, None))
    assert all(torch.equal(some, every[:, :, rows]) for some, every in zip(found, pool, strict=True))
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    size = sum(each.nbytes for each in found)
    assert size <= allocated <= 2 * size
