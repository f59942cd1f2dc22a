"""The trial before a model serves: what it accepts, and that it finds a pass which is another function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.engine.attention.plan import AttentionPlan
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.kernels.norms import RmsNorm
from slipstream.engine.kvcache.store import KVStore
from slipstream.engine.models import excerpt, forward_trial, known_files, lean_decoder
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.excerpt import SHORT_VOCABULARY, SHORT_WINDOW, Excerpt
from slipstream.engine.models.forward_trial import distances, same_function
from slipstream.engine.models.lean_decoder import Rotary, Rotation
from slipstream.engine.models.linear import Linear
from slipstream.engine.models.rehearsal import FAR, LONGEST_NEAR, PATHS, PROMPT, Rehearsal
from slipstream.errors import FailedPrecondition
from slipstream.telemetry.metrics_collector import forward_info
from tests.support.checkpoints import _COMMON, ALL, WINDOW, liven, save_checkpoint, save_tokenizer
from tests.support.packed_passes import library_model

LEAN = {"llama", "qwen2", "qwen3", "mistral"}
SOME_SLIDE = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load is tried, though the same weights passed before."""
    monkeypatch.setattr(forward_trial, "report_of", lambda question: "")
    monkeypatch.setattr(known_files, "report_of", lambda question: "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    @functools.cache
    def build(family: str, changes: tuple[tuple[str, Any], ...] = ()) -> str:
        path = save_checkpoint(family, tmp_path_factory.mktemp(family), **dict(changes))
        liven(path)
        return str(path)

    return build


def fast_path() -> str:
    return "lean" if find_kernels() is None else "kernels"


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "excerpt"])
@pytest.mark.parametrize("family", ALL)
def test_every_family_is_accepted_in_the_type_of_its_weights(
    family: str, whole: bool, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(excerpt, "WHOLE_BYTES", 0)
        monkeypatch.setattr(excerpt, "SHORT_VOCABULARY", 100)
    checkpoint = load_checkpoint(folder(family), "bfloat16")
    assert checkpoint.forward_path == (fast_path() if family in LEAN else "library")
    assert checkpoint.info.forward_path == checkpoint.forward_path and not checkpoint.info.forward_notice


def save_doge(path: Path, layer: int) -> str:
    """A model that adds numbers of its own to the attention mask of one layer."""
    torch.manual_seed(0)
    config = transformers.DogeConfig(**_COMMON)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.layers[layer].self_attn.A.add_(torch.ones(2))
    model.save_pretrained(path)
    save_tokenizer(path, config.vocab_size)
    return str(path)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_family_with_a_bias_in_its_mask_is_refused_with_layer_and_figure(layer: int, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=rf"float32 it differs from layer {layer} on, by up to \d\.\d+"):
        load_checkpoint(save_doge(tmp_path, layer))


def test_a_family_whose_window_is_lost_is_refused(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "attention", lambda self, layer, sinks: None)
    read = AttentionPlan._read
    monkeypatch.setattr(AttentionPlan, "_read", lambda self, at, kind: read(self, at, kind._replace(window=None)))
    with pytest.raises(FailedPrecondition, match=r"gemma3_text.*layer 0"):
        load_checkpoint(folder("gemma3"))


@pytest.mark.parametrize("wrong", ["tree", "moves"])
def test_a_family_whose_branches_are_mixed_up_is_refused(
    wrong: str, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVStore, "attention", lambda self, layer, sinks: None)
    if wrong == "tree":
        causal = lambda self, at: torch.full((self._segments[at].tokens,) * 2, float("-inf")).triu_(1)  # noqa: E731
        monkeypatch.setattr(AttentionPlan, "_inside_mask", causal)
    else:
        monkeypatch.setattr(KVStore, "queue_moves", lambda self, moves: None)
    with pytest.raises(FailedPrecondition, match=r"phi3.*differs"):
        load_checkpoint(folder("phi3"))


_ROTARY = Rotary.__call__
_ROTATION = Rotation.__call__
_ATTENTION = lean_decoder.Attention.__init__
_NORM = RmsNorm.__init__
_LINEAR = Linear.__init__


def _turned_back(self: Rotary, positions: torch.Tensor) -> Rotation:
    found = _ROTARY(self, positions)
    return Rotation(found.cosine, -found.sine)


def _turned_back_by_torch(self: Rotation, x: torch.Tensor) -> torch.Tensor:
    return _ROTATION(Rotation(self.cosine, -self.sine), x)


def _far_ones_wrong(self: Rotary, positions: torch.Tensor) -> Rotation:
    return _ROTARY(self, positions.clamp(max=255))


def _rounded_positions(self: Rotary, positions: torch.Tensor) -> Rotation:
    """Exact in float32; in bfloat16 there is no 257."""
    return _ROTARY(self, positions.to(self._like.dtype).long().clamp(max=len(self._cosine) - 1))


def _without_window(self: Any, module: Any, window: int | None) -> None:
    _ATTENTION(self, module, None)


def _swapped_window(self: Any, module: Any, window: int | None) -> None:
    _ATTENTION(self, module, SHORT_WINDOW if window is None else None)


def _wrong_scale(self: Any, module: Any, window: int | None) -> None:
    _ATTENTION(self, module, window)
    self._extras["scaling"] *= 1.1
    self.paged = self.paged._replace(scale=self.paged.scale * 1.1)


def _without_head_norms(self: Any, module: Any, window: int | None) -> None:
    _ATTENTION(self, module, window)
    self._norms = None


def _plain_norm(self: RmsNorm, weight: torch.Tensor, epsilon: float) -> None:
    _NORM(self, torch.ones_like(weight), epsilon)


def _larger_epsilon(self: RmsNorm, weight: torch.Tensor, epsilon: float) -> None:
    _NORM(self, weight, 100 * epsilon)


def _without_bias(self: Any, parts: Any, *, keep: bool = False) -> None:
    for part in parts:
        part.bias = None
    _LINEAR(self, parts, keep=keep)


MUTANTS: dict[str, tuple[str, dict[str, Any], Any, str, Any]] = {
    "turned back": ("llama", {}, Rotary, "__call__", _turned_back),
    "turned back without kernels": ("llama", {}, Rotation, "__call__", _turned_back_by_torch),
    "far positions": ("llama", {}, Rotary, "__call__", _far_ones_wrong),
    "no window": ("mistral", {}, lean_decoder.Attention, "__init__", _without_window),
    "swapped window": ("qwen2", SOME_SLIDE, lean_decoder.Attention, "__init__", _swapped_window),
    "scale": ("llama", {}, lean_decoder.Attention, "__init__", _wrong_scale),
    "no head norms": ("qwen3", {}, lean_decoder.Attention, "__init__", _without_head_norms),
    "norm without weight": ("llama", {}, RmsNorm, "__init__", _plain_norm),
    "epsilon": ("llama", {}, RmsNorm, "__init__", _larger_epsilon),
    "no bias": ("qwen2", {}, Linear, "__init__", _without_bias),
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "excerpt"])
@pytest.mark.parametrize(("mutant", "dtype"), [*((name, "float32") for name in MUTANTS), ("no window", "bfloat16")])
def test_a_lean_pass_that_is_another_function_is_left_out(
    mutant: str, dtype: str, whole: bool, folder: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    family, changes, kind, name, replacement = MUTANTS[mutant]
    path = folder(family, tuple(changes.items()))
    assert load_checkpoint(path, dtype).forward_path == fast_path()
    if not whole:
        monkeypatch.setattr(excerpt, "WHOLE_BYTES", 0)
    monkeypatch.setattr(kind, name, replacement)
    checkpoint = load_checkpoint(path, dtype)
    assert checkpoint.forward_path == checkpoint.info.forward_path == "library"
    assert "in float32 it differs from layer" in checkpoint.info.forward_notice
    assert checkpoint.info.forward_notice in caplog.text
    assert ("not promised" in checkpoint.info.forward_notice) is not checkpoint.info.batch_invariant


def test_a_fault_that_only_the_serving_type_has_is_found(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder("llama", (("max_position_embeddings", 8192),))
    monkeypatch.setattr(Rotary, "__call__", _rounded_positions)
    assert load_checkpoint(path, "float32").forward_path == fast_path()
    rounded = load_checkpoint(path, "bfloat16")
    assert rounded.forward_path == "library"
    assert "in bfloat16 it loses" in rounded.info.forward_notice and "far positions" in rounded.info.forward_notice


DEEP: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, tied": ("llama", 30, {"tie_word_embeddings": True}),
    "qwen2, biased": ("qwen2", 24, {}),
    "qwen3, norms of heads": ("qwen3", 28, {"head_dim": 16}),
    "mistral, untied": ("mistral", 32, {}),
}


def save_deep(path: Path, variant: str) -> str:
    """Real depth; one channel of the residual stream is tens of times as large as the others, as in real models."""
    family, depth, changes = DEEP[variant]
    save_checkpoint(family, path, num_hidden_layers=depth, **changes)
    liven(path)
    large = 7
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, large] += 5.0
        elif name.endswith("down_proj.weight") and ".layers.1." in name:
            weight[large] *= 100.0
        elif name.endswith("norm.weight") and len(weight) > large:
            weight[large] *= 0.1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.mark.parametrize("variant", DEEP)
def test_deep_models_with_outlier_channels_keep_the_fast_path(variant: str, tmp_path: Path) -> None:
    path = save_deep(tmp_path, variant)
    model = library_model(path, "float32")
    states: list[torch.Tensor] = []
    model.set_attn_implementation("eager")
    model.model.layers[2].register_forward_hook(lambda module, given, output: states.append(output))
    model(input_ids=torch.arange(9)[None], use_cache=False)
    sizes = states[0][0].abs().mean(dim=0)
    assert sizes[7] > 20 * sizes.median()
    for dtype in ("float32", "bfloat16"):
        assert load_checkpoint(path, dtype).forward_path == fast_path()


def test_an_excerpt_has_every_kind_of_layer_and_shares_what_serves(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    save_checkpoint("qwen2", tmp_path, **changes, vocab_size=2 * SHORT_VOCABULARY)
    model = library_model(str(tmp_path), "bfloat16")
    part = Excerpt(model, whole_bytes=0)
    assert part.depth == 4 and not part.is_the_model and part.vocabulary_size == SHORT_VOCABULARY
    shared, floats = part.copy(floats=False), part.copy(floats=True)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert {weight.untyped_storage().data_ptr() for weight in shared.parameters()} <= own
    assert not own & {weight.untyped_storage().data_ptr() for weight in floats.parameters()}
    assert {weight.dtype for weight in floats.parameters()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert [len(each.model.layers) for each in (model, shared, floats)] == [6, 4, 4]
    assert [each.model.layers[3].self_attn.sliding_window for each in (model, shared)] == [64, SHORT_WINDOW]
    assert [each.config.sliding_window for each in (model, shared)] == [64, SHORT_WINDOW]
    assert [len(each.lm_head.weight) for each in (model, shared)] == [2 * SHORT_VOCABULARY, SHORT_VOCABULARY]


def test_a_whole_model_without_windows_is_not_packed_twice(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = lean_decoder.LeanDecoder.__init__
    monkeypatch.setattr(
        lean_decoder.LeanDecoder, "__init__", lambda self, *given: (made.append(self), real(self, *given))[1]
    )
    forward = load_checkpoint(folder("llama"), "float32").forward
    assert made == [forward]


@pytest.mark.parametrize("length", [LONGEST_NEAR, 1000, 1 << 20])
def test_a_rehearsal_covers_far_positions_pieces_and_branches(length: int) -> None:
    rehearsal = Rehearsal(50, length, seed=1)
    assert max(rehearsal.far_positions) == min(length, FAR) - 1 and rehearsal.far_positions[:3] == [0, 1, 2]
    assert len(rehearsal.far) == len(rehearsal.far_positions)
    assert len({tuple(text) for text in rehearsal.near}) == len(PATHS) and PROMPT > SHORT_WINDOW
    assert sorted(row for rows in rehearsal.groups.values() for row in rows) == list(range(len(rehearsal.places)))


def test_rows_with_nan_equal_no_other_rows() -> None:
    rows = torch.randn(5, 20)
    broken = rows.clone()
    broken[3, 3] = float("nan")
    assert same_function(rows, rows) and not same_function(broken, rows) and not same_function(rows, broken)
    assert float(distances(rows + 1e-6, rows).max()) < 1e-5 < float(distances(rows.flip(1), rows).min())


def test_a_context_too_short_for_a_trial_is_served_by_the_library(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, max_position_embeddings=LONGEST_NEAR - 1)
    assert load_checkpoint(str(tmp_path)).forward_path == "library"


def test_the_metric_names_the_path_and_whether_a_faster_one_was_refused() -> None:
    assert forward_info("kernels", "")() == {("kernels", "0"): 1}
    assert forward_info("library", "it differs")() == {("library", "1"): 1}
    assert forward_info("", "")() == {}
