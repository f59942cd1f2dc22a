"""Attention and whole layers by our kernels against torch in double precision and against the layers one by one."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.engine import HiddenRequest
from slipstream.engine.kernels import attention, compiled
from slipstream.engine.kernels.attention import MOST_NODES, PagedLayer, StepParts, paged_attention
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.torch_engine import TorchEngine
from tests.support.checkpoints import VOCABULARY, WINDOW, save_checkpoint
from tests.support.kernels import kernels
from tests.support.packed_passes import TREE, prompt

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
SHAPES = [(2, 3, 64, 64), (1, 1, 16, 16), (3, 2, 48, 80), (1, 24, 128, 128), (2, 1, 512, 256)]
"""KV heads, query heads of each, dim of keys and of values."""
BLOCK = 16


INSTRUCTIONS = ("AVX2", "AVX-512", "AVX512-BF16")


@pytest.fixture(params=INSTRUCTIONS)
def wide(request: pytest.FixtureRequest, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    found = kernels(compiled, request.param != "AVX2", request.param == "AVX512-BF16")
    monkeypatch.setattr(attention, "find_kernels", lambda: found)
    return bool(request.param != "AVX2")


def sequence(length: int, capacity: int, scattered: bool) -> KVSequence:
    blocks = list(range(2, 2 + -(-capacity // BLOCK)))
    if scattered:
        random.Random(length).shuffle(blocks)
    return KVSequence(blocks, BLOCK, length=length)


def path(segment: Segment, row: int) -> list[int]:
    """The slots that a row sees, in the order of their positions."""
    base, pending = segment.sequence.length, len(segment.pending)
    if row < pending:
        return list(range(base + row + 1))
    nodes, node = [], row - pending
    while node >= 0:
        nodes.append(base + pending + node)
        node = segment.parents[node]
    return [*range(base + pending), *reversed(nodes)]


MASKS: dict[str, tuple[int | None, float | None, bool]] = {
    "plain": (None, None, False),
    "soft-capped": (7, 2.0, False),
    "with sinks": (150, None, True),
}
"""Window, soft cap, and whether there are sinks."""


def in_turn() -> list[Any]:
    """(instructions, shape, type, mask): each pair of two of them is in the short form, the whole product in the long
    one."""
    ways = product(enumerate(INSTRUCTIONS), enumerate(SHAPES), enumerate(TOLERANCE), enumerate(MASKS))
    return [
        pytest.param(wide, shape, dtype, mask, marks=() if (a + b + c + d) % 3 == 0 else pytest.mark.slow)
        for (a, wide), (b, shape), (c, dtype), (d, mask) in ways
    ]


@pytest.mark.parametrize(("wide", "shape", "dtype", "mask"), in_turn(), indirect=["wide"])
@torch.inference_mode()
def test_attention_is_that_of_double_precision(
    shape: tuple[int, int, int, int], dtype: torch.dtype, mask: str, wide: bool
) -> None:
    window, softcap, sinking = MASKS[mask]
    heads, group, key_dim, value_dim = shape
    chance = torch.Generator().manual_seed(group)
    tree = [random.Random(node).randrange(-1, node) for node in range(MOST_NODES if window is None else 40)]
    segments = [
        Segment(sequence(0, 300, False), [1] * 200),
        Segment(sequence(255, 600, True), [1, 2], [3] * len(tree), tree),
        Segment(sequence(3, 32, True), [1], [2, 3], [-1, 0]),
        Segment(sequence(130, 300, False), [1], [2] * 8, TREE),
    ]
    first = 0
    for each in segments:  # no two share a block
        each.sequence.blocks = [first + block for block in each.sequence.blocks]
        each.sequence.blocks_changed()
        first += len(each.sequence.blocks) + 2
    pool = [torch.randn(heads, first * BLOCK, dim, generator=chance).to(dtype) for dim in (key_dim, value_dim)]
    tokens = sum(each.tokens for each in segments)
    sizes = ((heads * group, key_dim), (heads, key_dim), (heads, value_dim))
    states = tuple(torch.randn(tokens, *size, generator=chance).to(dtype).transpose(0, 1)[None] for size in sizes)
    slots = [each.sequence.pool_rows(each.sequence.length, each.sequence.length + each.tokens) for each in segments]
    step = StepParts(segments, torch.tensor([row for own in slots for row in own]))
    assert step.fits
    sinks = torch.randn(heads * group, generator=chance).to(dtype) if sinking else None
    layer = PagedLayer(0, heads * group, window, key_dim**-0.5, softcap)
    kernel = paged_attention((pool[0], pool[1]), layer, sinks=sinks)
    assert kernel is not None
    found = kernel((states[0], states[1], states[2]), step)[0]

    row = 0
    for each in segments:
        rows = torch.tensor(each.sequence.pool_rows(0, each.sequence.length + each.tokens))
        keys, values = (every[:, rows].transpose(0, 1).double() for every in pool)
        assert torch.equal(keys[-each.tokens :], states[1][0, :, row : row + each.tokens].transpose(0, 1).double())
        for token in range(each.tokens):
            seen = path(each, token)[-window if window else 0 :]
            query = states[0][0, :, row].double().view(heads, group, key_dim)
            scores = torch.einsum("hgd,khd->hgk", query, keys[seen]) * key_dim**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(heads, group, 1)], 2)
            expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1)[..., : len(seen)], values[seen]).flatten(0, 1)
            assert (found[row].double() - expected).abs().max() < TOLERANCE[dtype] * (1 + expected.abs().max())
            row += 1
    assert row == tokens


@torch.inference_mode()
def test_bits_are_the_same_on_all_instruction_sets_and_threads(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = torch.Generator().manual_seed(0)
    pool = [torch.randn(2, 40 * BLOCK, 64, generator=chance) for _ in range(2)]
    segments = [Segment(sequence(270, 400, True), [1], [2] * 8, TREE)]
    rows = torch.tensor(segments[0].sequence.pool_rows(270, 279))
    states = tuple(torch.randn(1, heads, 9, 64, generator=chance) for heads in (6, 2, 2))
    found = []
    monkeypatch.setattr("slipstream.engine.kernels.compiled.FEW", 0)
    for wide, threads in ((False, 1), (True, 1), (True, 2)):
        monkeypatch.setattr(attention, "find_kernels", lambda wide=wide: kernels(compiled, wide))
        kernel = paged_attention((pool[0], pool[1]), PagedLayer(0, 6, None, 0.125))
        assert kernel is not None
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        found.append(kernel((states[0], states[1], states[2]), StepParts(segments, rows)))
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("dtype", TOLERANCE)
@torch.inference_mode()
def test_a_key_that_is_no_number_shows_in_the_rows_that_see_it_alone(dtype: torch.dtype, wide: bool) -> None:
    """Broken numbers end their session with an error; they must not look like a text."""
    chance = torch.Generator().manual_seed(0)
    pool = [torch.randn(1, 4 * BLOCK, 16, generator=chance).to(dtype) for _ in range(2)]
    kernel = paged_attention((pool[0], pool[1]), PagedLayer(0, 2, None, 0.3))
    assert kernel is not None
    step = StepParts([Segment(sequence(0, 16, False), [1, 2, 3])], torch.arange(2 * BLOCK, 2 * BLOCK + 3))
    states = [torch.randn(1, heads, 3, 16, generator=chance).to(dtype) for heads in (2, 1, 1)]
    sound = kernel((states[0], states[1], states[2]), step)[0]
    states[1][0, 0, 2, 5] = float("nan")
    found = kernel((states[0], states[1], states[2]), step)[0]
    assert torch.equal(found[:2], sound[:2]) and found[2].isnan().all()


@torch.inference_mode()
def test_a_layer_that_reads_another_one_s_rows_writes_none(wide: bool) -> None:
    chance = torch.Generator().manual_seed(0)
    pools = torch.randn(1, 4 * BLOCK, 16, generator=chance), torch.randn(1, 4 * BLOCK, 16, generator=chance)
    states = tuple(torch.randn(1, 1, 3, 16, generator=chance) for _ in range(3))
    step = StepParts([Segment(sequence(0, 16, False), [1, 2, 3])], torch.arange(2 * BLOCK, 2 * BLOCK + 3))
    own, reading = (paged_attention(pools, PagedLayer(at, 1, None, 0.3), writes=not at) for at in (0, 1))
    assert own is not None and reading is not None
    expected = own((states[0], states[1], states[2]), step)
    before = pools[0].clone(), pools[1].clone()
    assert torch.equal(reading((states[0], states[2], states[1]), step), expected)
    assert torch.equal(pools[0], before[0]) and torch.equal(pools[1], before[1])


def test_shapes_and_types_that_the_kernel_does_not_support_are_declined(wide: bool) -> None:
    pool = torch.zeros(1, 4, 24)
    assert paged_attention((pool, pool), PagedLayer(0, 1, None, 1.0)) is None
    assert paged_attention((pool.new_zeros(1, 4, 528), pool), PagedLayer(0, 1, None, 1.0)) is None
    assert paged_attention((pool.new_zeros(1, 4, 16), pool.new_zeros(1, 4, 16)), PagedLayer(0, 97, None, 1.0)) is None
    assert paged_attention((pool.double(), pool.double()), PagedLayer(0, 1, None, 1.0)) is None
    many = Segment(sequence(0, 400, False), [1], [2] * 257, [-1] * 257)
    assert not StepParts([many], torch.zeros(258, dtype=torch.int64)).fits


LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "mistral": {},
}
FAR_OFF = {"float32": 1e-5, "bfloat16": 0.06}


@pytest.mark.parametrize("dtype", FAR_OFF)
@pytest.mark.parametrize("family", LIKE)
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_all_layers_in_one_call_are_the_layers_one_by_one(
    family: str, dtype: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled.find_kernels() is None:
        pytest.skip("no kernels are installed")
    monkeypatch.setattr(compiled, "FEW", 0 if threads > 1 else compiled.FEW)
    checkpoint = load_checkpoint(str(save_checkpoint(family, tmp_path, **LIKE[family])), dtype)
    forward: Any = checkpoint.forward
    before, texts = torch.get_num_threads(), [prompt(length, length) for length in (40, 7)]
    torch.set_num_threads(threads)
    found = []
    for packed in (forward._packed, None):
        assert packed is forward._packed or packed is None
        forward._packed = packed
        engine, outputs = TorchEngine(checkpoint, 256), []
        sequences = [engine.kv.begin_unshared(64) for _ in texts]
        for size in (0, 8):
            steps = []
            for each, text in zip(sequences, texts, strict=True):
                nodes = [token % VOCABULARY for token in range(size)]
                steps.append(Segment(each, text if not size else [3], nodes, TREE[:size]))
            outputs.append(engine.forward(steps, HiddenRequest((0, 1))))
            for step in steps:
                engine.kv.keep(step, [])
        found.append(outputs)
    torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert one.hidden is not None and other.hidden is not None
        off = (one.logits - other.logits).abs().max() / other.logits.abs().max()
        assert off < FAR_OFF[dtype]
        assert torch.equal(one.hidden.layers[0], other.hidden.layers[0])
        for number in (0, 1):
            states, expected = one.hidden.layers[number].float(), other.hidden.layers[number].float()
            assert (states - expected).norm() <= FAR_OFF[dtype] * expected.norm()
        assert math.isfinite(float(one.hidden.last.float().norm()))


@torch.inference_mode()
def test_more_threads_than_cores_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other at each stage of each layer, and some of them come late."""
    if compiled.find_kernels() is None:
        pytest.skip("no kernels are installed")
    monkeypatch.setattr(compiled, "FEW", 0)
    engine = TorchEngine(load_checkpoint(str(save_checkpoint("llama", tmp_path)), "float32"), 256)
    before, found = torch.get_num_threads(), []
    for threads in (1, *[7] * 40):
        torch.set_num_threads(threads)
        step = Segment(engine.kv.begin_unshared(64), prompt(20, 0), [], [])
        found.append(engine.forward([step]).logits)
        engine.kv.close(step.sequence)
    torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)
