"""A bigger model that computes the same function: the price of a big target with the text of a small one.

Four exact changes (in real numbers; every scale is a power of two, so no stored weight is rounded):
  wider stream   the residual stream holds `copies` copies of itself; what reads it divides by `copies`
  more heads     random queries, keys and values whose columns of the output projection are zero
  wider MLP      random gate and up rows whose columns of the down projection are zero
  more layers    random layers whose output projections are zero: they add nothing to the stream
Copies leave the mean square of the stream alone, so RMSNorm needs no correction. Zeros are stored densely: no kernel
can skip the work.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slipstream.errors import FailedPrecondition, InvalidArgument

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
COPIES = (1, 2, 4, 8, 16)
SHARD_BYTES = 2 << 30
MLP_RATIO = 3.0  # the usual width of an MLP against the stream
REPORT = "inflation.json"

# (what the rows are, what the columns are) of every projection inside a layer.
PROJECTIONS = {
    "q_proj": ("heads", "stream"),
    "k_proj": ("kv_heads", "stream"),
    "v_proj": ("kv_heads", "stream"),
    "o_proj": ("stream", "heads"),
    "gate_proj": ("feed_forward", "stream"),
    "up_proj": ("feed_forward", "stream"),
    "down_proj": ("stream", "feed_forward"),
}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """About how many `parameters`; `hidden` and `layers` are chosen if None; `seed` decides the random weights."""

    parameters: int
    hidden: int | None = None
    layers: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Proportions:
    """The shape of a decoder. Sizes in features, `copies` of the base's stream."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool
    copies: int = 1

    @classmethod
    def of(cls, config: dict[str, Any]) -> Proportions:
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            feed_forward=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def width(self, role: str) -> int:
        """Features of a projection's rows or columns."""
        if role == "stream":
            return self.hidden
        if role == "feed_forward":
            return self.feed_forward
        return (self.heads if role == "heads" else self.kv_heads) * self.head_dim

    def parameters(self) -> int:
        """Of all projections and embeddings (norms and biases are noise)."""
        layer = sum(self.width(rows) * self.width(columns) for rows, columns in PROJECTIONS.values())
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)


def choose_proportions(base: Proportions, request: Request) -> Proportions:
    """A usual shape of about the requested size: depth by size, then the stream whose MLP is closest to 3 x as wide."""
    if request.hidden is not None and request.hidden not in [base.hidden * copies for copies in COPIES]:
        allowed = ", ".join(str(base.hidden * copies) for copies in COPIES)
        raise InvalidArgument(f"The hidden size must be one of {allowed}: only whole copies of the stream are exact.")
    if request.layers is not None and request.layers < base.layers:
        raise InvalidArgument(f"The model already has {base.layers} layers; ask for at least as many.")
    layers = request.layers or max(base.layers, round(14 * (request.parameters / 1e8) ** 0.25))
    options = [
        _fitted(base, layers, copies, request.parameters)
        for copies in COPIES
        if request.hidden in (None, base.hidden * copies)
    ]
    return min(options, key=lambda option: _oddness(option, request.parameters))


def _fitted(base: Proportions, layers: int, copies: int, parameters: int) -> Proportions:
    kind = {**asdict(base), "hidden": base.hidden * copies, "layers": layers, "copies": copies}
    kind |= {"heads": base.heads * copies, "kv_heads": base.kv_heads * copies, "feed_forward": 0}
    rest = parameters - Proportions(**kind).parameters()
    width = round(rest / (3 * layers * kind["hidden"] * 64)) * 64
    return Proportions(**{**kind, "feed_forward": max(base.feed_forward, width)})


def _oddness(option: Proportions, parameters: int) -> float:
    missed = abs(math.log(option.parameters() / parameters))
    return abs(math.log(option.feed_forward / option.hidden / MLP_RATIO)) + 100.0 * max(0.0, missed - 0.05)


def inflate(source: Path, out: Path, request: Request, progress: Progress | None = None) -> Proportions:
    """Write the inflated checkpoint of `source` to `out`, in the same dtype; an equal earlier result is kept.

    `progress` gets (layers written, layers in all).
    """
    config = _read_config(source)
    base = Proportions.of(config)
    shape = choose_proportions(base, request)
    report = {"base": _fingerprint(source), "seed": request.seed, **asdict(shape)}
    if (out / REPORT).exists() and json.loads((out / REPORT).read_text()) == report:
        return shape
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        writer = _Shards(fresh)
        for name, tensor in _Inflater(source, base, shape, request.seed).tensors(progress):
            writer.add(name, tensor)
        writer.close()
        _write_json(fresh / "config.json", _inflated_config(config, base, shape))
        _write_json(fresh / REPORT, report)
        for path in source.iterdir():
            if path.is_file() and path.name.startswith(("tokenizer", "generation_config", "special_tokens", "vocab.")):
                shutil.copyfile(path, fresh / path.name)
        if out.exists():
            out.rename(Path(scratch) / "old")
        fresh.rename(out)
    return shape


class _Inflater:
    """Makes the tensors of the bigger model one after the other."""

    def __init__(self, source: Path, base: Proportions, shape: Proportions, seed: int) -> None:
        self._base, self._shape = base, shape
        self._weights = _Weights(source)
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
        rows, columns = PROJECTIONS.get(suffix.split(".")[-2], (None, None))
        if rows is None or columns is None:
            return tensor if suffix.endswith(("q_norm.weight", "k_norm.weight")) else tensor.repeat(self._shape.copies)
        if tensor.ndim == 2:
            if columns == "stream":
                tensor = tensor.repeat(1, self._shape.copies) / self._shape.copies
            else:
                extra = self._shape.width(columns) - tensor.shape[1]
                tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], extra)], dim=1)
        if rows == "stream":
            return tensor.repeat(self._shape.copies, *[1] * (tensor.ndim - 1))
        extra_rows = (self._shape.width(rows) - tensor.shape[0], *tensor.shape[1:])
        return torch.cat([tensor, self._noise(extra_rows, tensor.dtype)])

    def _foreign(self, suffix: str) -> torch.Tensor:
        """A layer that adds nothing: its output projections are zero, everything before them is random."""
        tensor = self._weights[f"model.layers.0.{suffix}"]
        rows, columns = PROJECTIONS.get(suffix.split(".")[-2], (None, None))
        if rows is None or columns is None:
            size = self._base.head_dim if suffix.endswith(("q_norm.weight", "k_norm.weight")) else self._shape.hidden
            return torch.ones(size, dtype=tensor.dtype)
        size2 = (self._shape.width(rows), self._shape.width(columns))[: tensor.ndim]
        return torch.zeros(size2, dtype=tensor.dtype) if rows == "stream" else self._noise(size2, tensor.dtype)

    def _noise(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Non-zero numbers of about the size that keeps activations at unit scale."""
        scale = self._shape.hidden**-0.5
        # Uniform in [0.5, 1.5) with a random sign would cost twice the time; nothing here needs a bell curve.
        return torch.empty(size, dtype=dtype).uniform_(0.1 * scale, 1.9 * scale, generator=self._random)


def layer_origins(base: int, layers: int) -> list[int | None]:
    """Which layer of the base stands at each position, None for an added one; spread evenly."""
    origins: list[int | None] = [None] * layers
    for layer in range(base):
        origins[layer * layers // base] = layer
    return origins
