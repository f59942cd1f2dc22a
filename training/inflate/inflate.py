"""A bigger model that computes the same function: the price of a big target with the text of a small one.

Four changes, exact in real numbers (every scale is a power of two, so no stored weight is rounded):
  wider stream   the residual stream holds `copies` copies of itself; what reads it divides by `copies`
  more heads     random queries, keys and values whose columns of the output projection are zero
  wider MLP      random gate and up rows whose columns of the down projection are zero
  more layers    random layers whose output projections are zero: they add nothing to the stream
Copies leave the mean square of the stream alone, so RMSNorm needs no correction. Zeros are stored densely: no kernel
can skip the work.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import FailedPrecondition, NotFound
from training.folder import replacing
from training.inflate.proportions import PROJECTIONS, InflateRequest, Proportions, choose_proportions, layer_origins
from training.inflate.shards import ShardWriter, StoredWeights

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
COPIED_FILES = ("tokenizer", "generation_config", "special_tokens", "vocab.", "merges.")
REPORT = "inflation.json"
Progress = Callable[[int, int], None]


def inflate(source: Path, out: Path, request: InflateRequest, progress: Progress | None = None) -> Proportions:
    """Write the inflated checkpoint of `source` to `out`, in the same dtype; an equal earlier result is kept.

    `progress` gets (layers made, layers in all). Raises FailedPrecondition for a family whose layers are not known
    here, InvalidArgument for a shape that cannot be exact.
    """
    config = _read_config(source)
    base = Proportions.of(config)
    shape = choose_proportions(base, request)
    weights = StoredWeights(source)
    report = {"base": weights.fingerprint(), "seed": request.seed, **asdict(shape)}
    if (out / REPORT).exists() and json.loads((out / REPORT).read_text(encoding="utf-8")) == report:
        return shape
    with replacing(out) as fresh:
        writer = ShardWriter(fresh)
        for name, tensor in _Inflater(weights, base, shape, request.seed).tensors(progress):
            writer.add(name, tensor)
        writer.close()
        _write_json(fresh / "config.json", _inflated_config(config, base, shape))
        _write_json(fresh / REPORT, report)
        for path in source.iterdir():
            if path.is_file() and path.name.startswith(COPIED_FILES):
                shutil.copyfile(path, fresh / path.name)
    return shape


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise NotFound(f"There is no checkpoint in {source}: config.json is missing.")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise FailedPrecondition(f"A {kind} model cannot be inflated; supported are {', '.join(sorted(MODEL_TYPES))}.")
    if config.get("quantization_config"):
        raise FailedPrecondition("A quantised checkpoint cannot be inflated; use the original one.")
    return config


def _inflated_config(config: dict[str, Any], base: Proportions, shape: Proportions) -> dict[str, Any]:
    changed: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.feed_forward,
    }
    if config.get("layer_types"):
        origins = layer_origins(base.layers, shape.layers)
        changed["layer_types"] = [config["layer_types"][0 if origin is None else origin] for origin in origins]
    return {**config, **changed}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class _Inflater:
    """Makes the tensors of the bigger model one after the other."""

    def __init__(self, weights: StoredWeights, base: Proportions, shape: Proportions, seed: int) -> None:
        self._weights, self._base, self._shape = weights, base, shape
        self._random = torch.Generator().manual_seed(seed)

    def tensors(self, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the whole model."""
        copies = self._shape.copies
        embedding = self._weights["model.embed_tokens.weight"]
        yield "model.embed_tokens.weight", embedding.repeat(1, copies)
        for position, origin in enumerate(layer_origins(self._base.layers, self._shape.layers)):
            for suffix in self._weights.suffixes(origin or 0):
                name = f"model.layers.{position}.{suffix}"
                yield name, self._foreign(suffix) if origin is None else self._own(origin, suffix)
            if progress is not None:
                progress(position + 1, self._shape.layers)
        norm = self._weights["model.norm.weight"].repeat(copies)
        # A tied head reads the stream through the embedding, which cannot be divided: the norm before it is.
        yield "model.norm.weight", norm / copies if self._base.tied else norm
        if not self._base.tied:
            yield "lm_head.weight", self._weights["lm_head.weight"].repeat(1, copies) / copies

    def _own(self, origin: int, suffix: str) -> torch.Tensor:
        """A layer of the base: copied along the stream, padded along heads and MLP features."""
        tensor = self._weights[f"model.layers.{origin}.{suffix}"]
        roles = _roles(suffix)
        if roles is None:
            return tensor if _per_head(suffix) else tensor.repeat(self._shape.copies)
        rows, columns = roles
        if tensor.ndim == 2:
            tensor = self._wider(tensor, columns)
        if rows == "stream":
            return tensor.repeat(self._shape.copies, *[1] * (tensor.ndim - 1))
        extra = (self._shape.width(rows) - tensor.shape[0], *tensor.shape[1:])
        return torch.cat([tensor, self._noise(extra, tensor.dtype)])

    def _wider(self, tensor: torch.Tensor, columns: str) -> torch.Tensor:
        copies = self._shape.copies
        if columns == "stream":
            return tensor.repeat(1, copies) / copies
        extra = self._shape.width(columns) - tensor.shape[1]
        return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], extra)], dim=1)

    def _foreign(self, suffix: str) -> torch.Tensor:
        """A layer that adds nothing: its output projections are zero, everything before them is random."""
        like = self._weights[f"model.layers.0.{suffix}"]
        roles = _roles(suffix)
        if roles is None:
            return torch.ones(like.shape[0] if _per_head(suffix) else self._shape.hidden, dtype=like.dtype)
        size = tuple(self._shape.width(role) for role in roles)[: like.ndim]
        return torch.zeros(size, dtype=like.dtype) if roles[0] == "stream" else self._noise(size, like.dtype)

    def _noise(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the size that keeps activations near unit scale; a normal one is practically never zero."""
        return torch.empty(size, dtype=dtype).normal_(std=self._shape.hidden**-0.5, generator=self._random)


def _roles(suffix: str) -> tuple[str, str] | None:
    """The roles of the rows and columns of a layer's parameter, e.g. `self_attn.q_proj.weight`; None for norms."""
    return PROJECTIONS.get(suffix.split(".")[-2])


def _per_head(suffix: str) -> bool:
    return suffix.endswith(("q_norm.weight", "k_norm.weight"))
