"""The parts of a Llama-like decoder straight from a checkpoint's files, without the library's modelling code.

Importing that code takes a process longer than a small model takes to load, and some 300 MB of memory. What is read
here serves only where a start with the library found it equal (`equal_parts`, kept with the trial that passed): the
same weights bit for bit, the same layers, the same rotary tables.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.engine.kvcache.store import AttentionLayer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm"
NORMS = ("input_layernorm", "post_attention_layernorm")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies do not depend on the length of a session."""
TABLE_POSITIONS = (0, 1, 2, 1023, 8191, 131_071)
"""At which rotary tables are compared."""


class NotPlain(Exception):
    """The files hold something else than one tensor for each weight of such a decoder."""


@dataclass(frozen=True, slots=True)
class LeanParts:
    """Parts that `slipstream.engine.models.lean_decoder.LeanDecoder` takes its weights from."""

    model: Any
    """With `model` and `lm_head`, named as in the library."""
    layers: list[AttentionLayer]
    parameters: int
    """Numbers in its weights; tied ones count once."""


class _Rotary:
    """Tables of cosines and sines as the library's modules compute them."""

    def __init__(self, config: Any, dim: int) -> None:
        rope = config.rope_parameters
        kind = rope["rope_type"]
        if kind not in ROPE_TYPES:
            raise NotPlain(f"{kind} rotary embeddings")
        if kind == "default":
            frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
            self._frequencies, self._scaling = frequencies, 1.0
        else:
            self._frequencies, self._scaling = ROPE_INIT_FUNCTIONS[kind](config)

    def __call__(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [1, T] -> cosines and sines [1, T, dim] in the dtype of `like`."""
        angles = position_ids[..., None].float() * self._frequencies
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self._scaling).to(like.dtype), (both.sin() * self._scaling).to(like.dtype)


class _Tensors:
    """The tensors of a folder by name, in one type, each read when it is asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype, stack: ExitStack) -> None:
        names = [SINGLE]
        if (folder / INDEX).is_file():
            names = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        self.read: set[str] = set()
        for name in names:
            file = stack.enter_context(safe_open(folder / name, "pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises NotPlain for a name that no file has, or numbers of another kind."""
        if name not in self._files:
            raise NotPlain(f"no {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise NotPlain(f"{name} is {tensor.dtype}")
        self.read.add(name)
        return tensor.to(self._dtype)

    @property
    def unread(self) -> set[str]:
        return set(self._files) - self.read


def read_parts(folder: Path, config: Any, dtype: torch.dtype, windows: list[int | None]) -> LeanParts:
    """The decoder in `folder`, whose layers have these sliding windows, on the CPU; its type becomes `dtype`. Raises
    NotPlain for one that is not read here."""
    with ExitStack() as stack:
        try:
            return _read(_Tensors(folder, dtype, stack), config, windows)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise NotPlain(str(error)) from error


def _read(tensors: _Tensors, config: Any, windows: list[int | None]) -> LeanParts:
    if len(windows) != config.num_hidden_layers:
        raise NotPlain(f"{len(windows)} windows of {config.num_hidden_layers} layers")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = [_layer(tensors, config, index, dim) for index in range(len(windows))]
    embedding = nn.Parameter(tensors[EMBEDDING], requires_grad=False)
    head = embedding if config.tie_word_embeddings else nn.Parameter(tensors[HEAD], requires_grad=False)
    inner = _named(
        embed_tokens=_named(weight=embedding),
        layers=nn.ModuleList(layers),
        norm=_norm(tensors, config, NORM),
        rotary_emb=_Rotary(config, dim),
    )
    if unread := tensors.unread:
        raise NotPlain(f"{min(unread)} is no part of such a decoder")
    model = _named(model=inner, lm_head=_linear(head, None))
    shapes = [
        AttentionLayer(
            index=index,
            source=index,
            heads=config.num_key_value_heads,
            key_dim=dim,
            value_dim=dim,
            window=window,
            dtype=embedding.dtype,
            device=embedding.device,
            group=config.num_attention_heads // config.num_key_value_heads,
        )
        for index, window in enumerate(windows)
    ]
    return LeanParts(model, shapes, sum(weight.numel() for weight in model.parameters()))


def equal_parts(parts: LeanParts, model: Any, layers: list[AttentionLayer]) -> bool:
    """True if `parts` are those of the library's model, which has these attention layers, bit for bit."""
    ours, theirs = dict(parts.model.named_parameters()), dict(model.named_parameters())
    if parts.layers != layers or ours.keys() != theirs.keys():
        return False
    if not all(ours[name].dtype is each.dtype and torch.equal(ours[name], each) for name, each in theirs.items()):
        return False
    if _numbers(parts.model) != _numbers(model):
        return False
    positions, like = torch.tensor([TABLE_POSITIONS]), ours[EMBEDDING]
    tables = [each.model.rotary_emb(like, position_ids=positions) for each in (parts.model, model)]
    return all(torch.equal(one, other) for one, other in zip(*tables, strict=True))


def _numbers(model: Any) -> list[object]:
    """Everything but weights that the lean decoder takes from a model's modules."""
    numbers: list[object] = []
    for _, module in model.named_modules():
        numbers += [getattr(module, name) for name in ("head_dim", "scaling", "layer_idx") if hasattr(module, "q_proj")]
        numbers += [module.variance_epsilon] if hasattr(module, "variance_epsilon") else []
    return numbers


def _layer(tensors: _Tensors, config: Any, index: int, dim: int) -> nn.Module:
    prefix = f"model.layers.{index}"
    attention = {f"{name}_proj": _linear_of(tensors, f"{prefix}.self_attn.{name}_proj") for name in "qkvo"}
    for name in ("q_norm", "k_norm"):
        if f"{prefix}.self_attn.{name}.weight" in tensors:
            attention[name] = _norm(tensors, config, f"{prefix}.self_attn.{name}")
    attend = _named(**attention)
    attend.layer_idx, attend.head_dim, attend.scaling = index, dim, dim**-0.5  # type: ignore[assignment]
    feed = {f"{name}_proj": _linear_of(tensors, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up", "down")}
    norms = {name: _norm(tensors, config, f"{prefix}.{name}") for name in NORMS}
    return _named(self_attn=attend, mlp=_named(**feed), **norms)


def _norm(tensors: _Tensors, config: Any, name: str) -> nn.Module:
    module = _named(weight=nn.Parameter(tensors[f"{name}.weight"], requires_grad=False))
    module.variance_epsilon = config.rms_norm_eps
    return module


def _linear_of(tensors: _Tensors, name: str) -> nn.Module:
    bias = f"{name}.bias" if f"{name}.bias" in tensors else ""
    return _linear(tensors[f"{name}.weight"], tensors[bias] if bias else None)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def _named(**parts: Any) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module
