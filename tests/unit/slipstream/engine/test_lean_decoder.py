"""The lean forward pass against the library's own, and when it is not taken."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import factory
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.forward_trial import distances
from slipstream.engine.models.lean_decoder import LeanDecoder, Rotary
from slipstream.engine.models.lean_selection import fits
from slipstream.engine.models.library_forward import LibraryForward
from slipstream.engine.segment import Segment
from slipstream.engine.torch_engine import TorchEngine
from tests.support.checkpoints import VOCABULARY, WINDOW, liven, save_checkpoint
from tests.support.packed_passes import library_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [4.0] * 8,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def build(variant: str) -> str:
        family, changes = VARIANTS[variant]
        path = save_checkpoint(family, tmp_path_factory.mktemp("checkpoint"), **changes)
        liven(path)
        return str(path)

    return build


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(engine: TorchEngine) -> torch.Tensor:
    """Logits of prompts, and of a mixed step after them: one token, a chain, two trees."""
    sequences = [engine.kv.begin_unshared(64) for _ in range(4)]
    starts = [
        Segment(sequence, prompt(length, length)) for sequence, length in zip(sequences, (5, 20, 31, 13), strict=True)
    ]
    found = [engine.forward(starts).logits]
    for start in starts:
        engine.kv.keep(start, [])
    shapes = ([], [-1, 0, 1], [-1, -1, 0, 0, 1], [-1, -1, -1, 2, 2])
    step = [
        Segment(sequence, [7], prompt(len(parents), 9), parents)
        for sequence, parents in zip(sequences, shapes, strict=True)
    ]
    found += [engine.forward(step).logits, engine.forward(step[:1]).logits]
    return torch.cat(found)


def engines(name: str, dtype: str) -> list[TorchEngine]:
    """On the lean forward, on the library's."""
    checkpoints = [load_checkpoint(name, dtype, lean=lean) for lean in (True, False)]
    assert [type(checkpoint.forward) for checkpoint in checkpoints] == [LeanDecoder, LibraryForward]
    return [TorchEngine(checkpoint, tokens=512, block_size=8) for checkpoint in checkpoints]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lean_pass_returns_the_librarys_logits(variant: str, dtype: str, folder: Any) -> None:
    lean, library = (rows(engine) for engine in engines(folder(variant), dtype))
    if dtype == "float32":
        assert torch.allclose(lean, library, atol=1e-4)
    else:
        assert distances(lean, library).median() < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_other_sequences_of_the_step(dtype: str, folder: Any) -> None:
    engine = engines(folder("llama"), dtype)[0]
    starts = [Segment(engine.kv.begin_unshared(64), prompt(length, length)) for length in (20, 1, 14)]
    together = engine.forward(starts).logits
    assert torch.equal(together, torch.cat([engine.forward([start]).logits for start in starts]))
    for start in starts:
        engine.kv.keep(start, [])
    step = [
        Segment(start.sequence, [3], [5] * count, [-1] * count) for start, count in zip(starts, (0, 3, 1), strict=True)
    ]
    together = engine.forward(step).logits
    assert torch.equal(together, torch.cat([engine.forward([segment]).logits for segment in step]))


def test_no_weight_is_kept_twice(folder: Any) -> None:
    with torch.inference_mode(False):
        before = living_bytes()
        library = load_checkpoint(folder("qwen3"), lean=False)
        whole = living_bytes() - before
        del library
        checkpoint = load_checkpoint(folder("qwen3"))
        left = living_bytes() - before
    # Weights are filled up to whole tiles, and tied embeddings are there twice; what oneDNN packs is hidden from torch.
    assert isinstance(checkpoint.forward, LeanDecoder) and left < 1.3 * whole


def living_bytes() -> int:
    """Of tensors with numbers of their own: what a `PackedWeight` stands for is a tensor of its product."""
    gc.collect()
    found = [
        thing
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided
    ]
    return sum({thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes() for thing in found}.values())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {}),
        ("granite", {}),
        ("phi3", {}),
        ("mixtral", {}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_other_models_are_served_by_the_librarys_forward_pass(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(family, tmp_path, **changes)
    assert isinstance(load_checkpoint(str(tmp_path)).forward, LibraryForward)


def test_a_model_that_was_changed_does_not_fit(folder: Any) -> None:
    path = folder("llama")
    assert fits(library_model(path))
    hooked, wrapped, replaced, mixed, longer = (library_model(path) for _ in range(5))
    wrapped.model.layers[0].forward = wrapped.model.layers[0].forward
    hooked.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output)
    replaced.model.layers[0].mlp.up_proj = torch.nn.Sequential(replaced.model.layers[0].mlp.up_proj)
    mixed.model.norm.half()
    longer.model.layers[2].adapter = torch.nn.Identity()
    assert not any(map(fits, (hooked, wrapped, replaced, mixed, longer)))


def test_tables_grow_and_stay_what_they_were(folder: Any) -> None:
    rotary = library_model(folder("yarn")).model.rotary_emb
    whole, grown = (Rotary(rotary, torch.empty(0, 1)) for _ in range(2))
    whole.reserve(200)
    for length in (3, 150, 20, 200):
        grown.reserve(length)
    x, positions = torch.randn(3, 4, 16), torch.tensor([0, 2, 199])
    assert torch.equal(whole(positions)(x), grown(positions)(x))


def test_the_switch_reaches_the_engine(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from drafter_svc.config import DrafterConfig
    from drafter_svc.drafter import open_configured
    from slipstream.engine.models import checkpoint as loading
    from verifier_svc.config import VerifierConfig
    from verifier_svc.verifier import open_target

    seen: list[Any] = []
    real = loading.load_checkpoint

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(loading, "load_checkpoint", watched)
    for lean in (True, False):
        open_target(VerifierConfig(folder("llama"), kv_tokens=64, lean=lean))
        open_configured(DrafterConfig(folder("llama"), kv_tokens=64, lean=lean))
        factory.open_engine(folder("llama"), kv_tokens=64, lean=lean)
    assert [type(found.forward) for found in seen] == [LeanDecoder] * 3 + [LibraryForward] * 3
