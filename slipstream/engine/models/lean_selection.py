"""The choice of the lean forward pass: for models with its parts whose logits equal the library's in a trial pass."""

from __future__ import annotations

import logging
from typing import Any

import torch

from slipstream.engine.attention.packed import States, explicit_attention
from slipstream.engine.attention.reads import HIDDEN
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.models.forward import Forward, LibraryForward
from slipstream.engine.models.lean_decoder import LeanDecoder
from slipstream.engine.models.linear import quantised_bytes

SEED = 20260
FAR = 1 << 16
"""Positions beyond are not tried."""
BRANCHES = (-1, -1, 0, 0, 2)
"""Parents of the tree's nodes; -1 is the chain's token at position `ROOT`."""
ROOT = 3
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.05, 0.3), torch.float16: (0.01, 0.1)}
"""Bounds of `differences`: the median row's and the worst row's. Another function is off by
about 1 where it differs; rounding moves a row of a trained model by 1 to 2 % in bf16, and now and then one by 10 %."""


class Rehearsal:
    """A step without KV: its rows see each other as far as tree and window let them. The chain's positions double, so
    that the last ones are far; the tree hangs near its beginning."""

    def __init__(self, vocabulary_size: int, length: int, device: torch.device) -> None:
        length = min(length, FAR)
        chain = [*range(ROOT), *(ROOT << power for power in range(64) if ROOT << power < length), length - 1]
        chain = sorted({position for position in chain if position < length})
        root = min(ROOT, len(chain) - 1)
        seen = torch.ones(len(chain) + len(BRANCHES), len(chain) + len(BRANCHES), dtype=torch.bool).tril_()
        positions = list(chain)
        for row, parent in enumerate(BRANCHES, start=len(chain)):
            above = root if parent < 0 else len(chain) + parent
            seen[row, :row] = seen[above, :row]
            positions.append(min(positions[above] + 1, length - 1))
        draw = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(vocabulary_size, (1, len(positions)), generator=draw).to(device)
        self.positions = torch.tensor([positions], device=device)
        self.wanted = torch.arange(len(positions), device=device)
        self._hidden = ~seen.to(device)

    def paged(self, layers: object) -> None:
        """There are no pages."""

    def attend(self, module: object, states: States, extras: dict[str, object]) -> torch.Tensor:
        query, key, value = states
        hidden = self._hidden
        window = extras.get("sliding_window")
        if isinstance(window, int):
            hidden = hidden | (self.positions.T - self.positions >= window)
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, HIDDEN)
        group = query.shape[1] // key.shape[1]
        repeated = (query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        found = explicit_attention(repeated, mask, float(extras["scaling"]), None, None)  # type: ignore[arg-type]
        return found.transpose(1, 2)


@torch.inference_mode()
def rehearse(forward: Forward, rehearsal: Rehearsal) -> torch.Tensor:
    """fp32 [rows, V]."""
    forward.reserve(int(rehearsal.positions.max()) + 1)
    return forward(rehearsal).logits.float()


def differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's distance [R] as a share of how far its logits lie from their mean."""
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    off: torch.Tensor = (found - expected).norm(dim=1) / spread
    return off


def same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if both are one function but for the rounding of `dtype`; NaN equals nothing."""
    off = differences(found, expected)
    typical, worst = BOUNDS[dtype]
    return bool(off.median() < typical) and bool((off < worst).all())


log = logging.getLogger(__name__)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_OUTSIDE = {"", "model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"}
_LINEARS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_INSIDE = {"", "self_attn", "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm"} | _LINEARS
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}


def lean_forward(model: Any, layers: list[AttentionLayer], length: int) -> LeanDecoder | None:
    """The decoder, which has taken the model's weights; None, and then the weights are lost too, when it answers
    otherwise than the library does. `length` bounds the positions that will be asked for. The model must `fit`."""
    rehearsal = Rehearsal(model.lm_head.out_features, length, layers[0].device)
    expected = rehearse(LibraryForward(model), rehearsal)
    windows = {layer.index: layer.window for layer in layers}
    decoder = LeanDecoder(model, [windows[index] for index in range(len(layers))])
    if not same(rehearse(decoder, rehearsal), expected, layers[0].dtype):
        log.warning("%s: the lean forward answers otherwise; the library's is used", model.config.model_type)
        return None
    return decoder


def fits(model: Any) -> bool:
    """True if the model has the parts of a Llama-like decoder and no others, all as they were loaded: weights of one
    dtype on one device, plain or int8 where there are kernels, without hooks."""
    if model.config.model_type not in FAMILIES or model.config.hidden_act != "silu":
        return False
    modules = dict(model.named_modules())
    if any(map(_hooked, modules.values())):
        return False
    weights = list(model.parameters())
    others = {id(weight) for weight in weights if type(weight) is not torch.nn.Parameter}
    if others and (find_kernels() is None or not _in_bytes(modules, others)):
        return False
    if len({(weight.dtype, weight.device) for weight in weights}) != 1 or weights[0].dtype not in BOUNDS:
        return False
    return _shaped(modules) and _whole_heads(modules)


def _in_bytes(modules: dict[str, Any], weights: set[int]) -> bool:
    """True if `weights` are those of the layers' linear parts, all of them, and kernels of ours multiply them."""
    linears = [part for name, part in modules.items() if any(name.endswith(f".{linear}") for linear in _LINEARS)]
    kept = all(quantised_bytes(part.weight.detach()) is not None for part in linears)
    return kept and {id(part.weight) for part in linears} == weights


def _hooked(module: Any) -> bool:
    """By torch's own hooks, or as placing a model on several devices does it: with a `forward` of the instance."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _shaped(modules: dict[str, Any]) -> bool:
    outside = {name for name in modules if not name.startswith("model.layers.")}
    if outside != _OUTSIDE or type(modules["lm_head"]) is not torch.nn.Linear:
        return False
    for index in range(len(modules["model.layers"])):
        prefix = f"model.layers.{index}"
        inside = {name.removeprefix(prefix).lstrip("."): part for name, part in modules.items() if _below(name, prefix)}
        if set(inside) not in (_INSIDE, _INSIDE | _HEAD_NORMS):
            return False
        if any(type(inside[name]) is not torch.nn.Linear for name in _LINEARS):
            return False
    return True


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _whole_heads(modules: dict[str, Any]) -> bool:
    """True if rotary embeddings turn all of a head, the same way for all layers."""
    rotary, like = modules["model.rotary_emb"], modules["model.embed_tokens"].weight
    cosine, _ = rotary(like, position_ids=torch.zeros(1, 1, dtype=torch.int64, device=like.device))
    return all(cosine.shape[-1] == module.head_dim for name, module in modules.items() if name.endswith("self_attn"))
