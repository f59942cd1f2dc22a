"""Models of the library's modelling code on a CPU: a row has the same bits in every pass, or that is not promised."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.models import packed_library
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.lean_selection import FAMILIES as LEAN
from slipstream.engine.models.packed_library import Rotations
from slipstream.engine.models.packed_weight import PackedWeight, ProductsSeen, packed
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.torch_engine import TorchEngine
from tests.support.checkpoints import FAMILIES, SELDOM, UNEVEN, VOCABULARY, save_checkpoint

LIBRARY = [family for family in FAMILIES if family not in LEAN and family not in UNEVEN]
LENGTHS, MOST_NODES = (30, 19), 12
"""Tokens of the texts that share passes, and candidates of one in a pass."""
Folder = Callable[[str], Path]
pytestmark = pytest.mark.skipif(find_kernels() is None, reason="no compiled kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return functools.cache(lambda family: save_checkpoint(family, tmp_path_factory.mktemp(family)))


def one_by_one(engine: TorchEngine, text: list[int]) -> torch.Tensor:
    sequence, rows = engine.kv.begin_unshared(len(text)), []
    for token in text:
        segment = Segment(sequence, [token])
        rows.append(engine.forward([segment]).logits[0])
        engine.kv.keep(segment, [])
    engine.kv.close(sequence)
    return torch.stack(rows)


def random_part(chance: random.Random, sequence: KVSequence, text: list[int]) -> tuple[Segment, list[int]]:
    """Some tokens of the rest of a text, with a tree below them, and the tree's nodes that the text takes."""
    at, count = sequence.length, chance.choice((1, 1, 2, 9))
    pending = text[at : at + count]
    rest, nodes, parents, way = text[at + count :], list[int](), list[int](), list[int]()
    for node in range(chance.randrange(MOST_NODES)):
        right = len(way) < len(rest) and chance.random() < 0.5
        nodes.append(rest[len(way)] if right else chance.randrange(VOCABULARY))
        parents.append((way[-1] if way else -1) if right else chance.randrange(-1, node))
        if right:
            way.append(node)
    return Segment(sequence, pending, nodes, parents), way


def count_other_rows(engine: TorchEngine, seed: int) -> tuple[int, int]:
    """Rows of random passes whose bits are other than in a pass of their own, and all."""
    chance = random.Random(seed)
    texts = [[chance.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    expected = [one_by_one(engine, text) for text in texts]
    sequences = [engine.kv.begin_unshared(length + MOST_NODES) for length in LENGTHS]
    different = compared = 0
    while running := [at for at, each in enumerate(sequences) if each.length < LENGTHS[at]]:
        steps = [(at, *random_part(chance, sequences[at], texts[at])) for at in running]
        found = engine.forward([segment for _, segment, _ in steps]).logits
        for at, segment, way in steps:
            own, found = found[: 1 + len(segment.nodes)], found[1 + len(segment.nodes) :]
            first = segment.sequence.length + len(segment.pending) - 1
            right = own[[0, *(1 + node for node in way)]]
            same = [torch.equal(row, other) for row, other in zip(right, expected[at][first:], strict=False)]
            different, compared = different + same.count(False), compared + len(same)
            engine.kv.keep(segment, way)
    return different, compared


@pytest.mark.parametrize(
    ("family", "dtype", "threads"),
    [
        pytest.param(
            *(family, dtype, threads),
            marks=() if (at + other + threads) % 2 and family not in SELDOM else pytest.mark.slow,
        )
        for at, family in enumerate(LIBRARY)
        for other, dtype in enumerate(("bfloat16", "float32"))
        for threads in (1, 2)
    ],
)
def test_a_row_has_the_same_bits_in_every_pass(
    family: str, dtype: str, threads: int, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads, experts, windows, soft caps and sinks as of the rest; widths leave numbers at the ends of arrays.
    In the short suite each family has both types, one of them with one thread, and the other with two."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(compiled, "FEW", 0 if threads > 1 else compiled.FEW)
    checkpoint = load_checkpoint(str(folder(family)), dtype)
    assert checkpoint.forward_path == "library" and checkpoint.info.batch_invariant
    different, compared = count_other_rows(TorchEngine(checkpoint, 512), seed=threads)
    assert compared >= len(LENGTHS) * 4 and not different


@pytest.mark.parametrize("part", ["ACTIVATIONS", "Rotations", "weights", "experts"])
def test_without_one_of_its_parts_a_pass_is_not_batch_invariant(
    part: str, folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass is watched: what else it is made of is named."""
    if part == "ACTIVATIONS":
        monkeypatch.setattr(packed_library, "ACTIVATIONS", {})
        monkeypatch.setattr(packed_library, "FUNCTIONS", {})
    elif part == "Rotations":
        monkeypatch.setattr(Rotations, "forward", lambda self, *given, **more: self.module(*given, **more))
    else:
        left = 2 if part == "weights" else 3
        some = lambda weight, use: None if weight.dim() == left else packed(weight, use)  # noqa: E731
        monkeypatch.setattr(packed_library, "packed", some)
    with caplog.at_level(logging.INFO):
        checkpoint = load_checkpoint(str(folder("mixtral")), "float32")
    named = {"ACTIVATIONS": "silu", "Rotations": "cos", "weights": "linear", "experts": "linear"}[part]
    assert named in checkpoint.forward.uneven and named in caplog.text
    assert not checkpoint.info.batch_invariant and checkpoint.info.arithmetic.endswith("/float32/embedded")


@pytest.mark.parametrize("family", UNEVEN)
def test_operators_that_are_torch_s_are_named(family: str, folder: Folder) -> None:
    checkpoint = load_checkpoint(str(folder(family)), "bfloat16")
    assert checkpoint.forward.uneven == {UNEVEN[family]} and not checkpoint.info.batch_invariant


class Multiplying(torch.nn.Module):
    """A product of each kind."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("out_in", (7, 6)), ("in_out", (6, 7)), ("experts", (3, 6, 7)), ("read", (7, 6))):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))
        self.bias = torch.nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        one = torch.tensor(1)
        return [
            linear(x, self.out_in, self.bias),
            torch.addmm(self.bias, x, self.in_out),
            x @ self.experts[one],
            linear(x, 2 * self.read),
        ]


@torch.inference_mode()
def test_weights_of_products_are_found_and_packed_and_no_others() -> None:
    torch.manual_seed(0)
    module, x = Multiplying(), torch.randn(5, 6)
    with ProductsSeen(module) as seen:
        expected = module(x)
    names = {id(each): name for name, each in module.named_parameters()}
    uses = {names[each]: use for each, use in seen.uses.items()}
    assert set(uses) == {"out_in", "in_out", "experts"}
    assert [use.turned for use in uses.values()] == [False, True, True]
    for name, use in uses.items():
        weight = packed(getattr(module, name), use)
        assert isinstance(weight, PackedWeight) and weight.shape == getattr(module, name).shape
        del module._parameters[name]
        setattr(module, name, weight)
    for found, other in zip(module(x), expected, strict=True):
        assert torch.allclose(found, other, atol=1e-5)
    with pytest.raises(NotImplementedError, match="packed"):
        module.out_in + 1


def test_rotations_do_not_depend_on_the_number_of_reserved_positions(folder: Folder) -> None:
    source = load_checkpoint(str(folder("olmo2")), "float32").forward.model.model.rotary_emb  # type: ignore[attr-defined]
    assert isinstance(source, Rotations)
    x, positions = torch.zeros(1, 3, 64), torch.tensor([[0, 40, 98]])
    found = []
    for length in (99, 100, 5000):
        tables = Rotations(source.module)
        tables.reserve(length)
        found.append(tables(x, positions))
    for cosine, sine in found:
        assert torch.equal(cosine, found[0][0]) and torch.equal(sine, found[0][1])
    assert torch.allclose(found[0][0], source.module(x, positions)[0], atol=1e-6)
