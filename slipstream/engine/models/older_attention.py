"""Attention layers of modelling code that is older than the library's attention interface, made to call it.

Such a layer computes its scores itself, in one of a dozen ways. `OlderAttention` stands where the library's layer
stood. In a planned pass it takes queries, keys and values from the layer's own parts and lets the step attend; in any
other pass the library's layer computes everything, which is what a trial compares with.

ALiBi (Press et al. 2021, arXiv 2108.12409) adds to a score what depends on the head and the key's position. That is a
product too: keys get more numbers, their bias in parts that add up to it, and queries ones. So no attention of ours
has to know of it, and a row's bits depend on what they depend on elsewhere. The query's own bias is taken off, which
softmax does not see: far from the beginning of a text scores stay as small, and so as exact, as at its beginning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from slipstream.engine.attention.packed import attention, current_plan

MORE = 16
"""Numbers of a head that biases take, of which six are not zero: kernels read 16 at a time."""
PARTS = 3
"""Parts of a bias, in the type of the keys: three bfloat16 numbers have the digits of one float32."""
UNIT = 64.0
"""The ones of queries and keys: float16 holds a 64th of the largest bias."""


class OlderAttention(nn.Module):
    """One layer. Subclasses say what the library's `module` makes of hidden states [1, T, hidden]."""

    slopes: Any
    """By `slopes_of`."""

    def __init__(self, module: Any, index: int, config: Any) -> None:
        super().__init__()
        self.module = module
        self.layer_idx: int = index
        self.is_causal = True
        self.register_buffer("slopes", self.slopes_of(config), persistent=False)

    def slopes_of(self, config: Any) -> torch.Tensor | None:
        """Slopes that ALiBi adds to a head's scores for each position, fp32 [heads]; None without ALiBi."""
        return None

    def bias(self, positions: torch.Tensor) -> torch.Tensor:
        """Bias of keys at these positions [T], fp32 [T, heads]."""
        found: torch.Tensor = positions.unsqueeze(1) * self.slopes
        return found

    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        """Computes the output of the library's layer, by the step's attention."""
        raise NotImplementedError

    def library(self, *given: Any, **more: Any) -> Any:
        return self.module(*given, **more)

    def forward(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        if current_plan() is None:
            return self.library(hidden_states, *given, **more)
        return self.planned(hidden_states, *given, **more)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None = None
    ) -> torch.Tensor:
        """query [1, H, T, D]; key, value [1, Hkv, T, D]. Returns [1, T, H * D]."""
        plan = current_plan()
        if plan is not None and self.slopes is not None:
            # Each head has its own bias, and so its own keys.
            key, value = (each.expand(1, query.shape[1], -1, -1) for each in (key, value))
            bias = self.bias(plan.positions[0].to(query.device))
            query, key = with_bias(query, key, bias / (scaling * UNIT))
        found, _ = attention(self, query, key, value, None, scaling=scaling, sliding_window=window)
        return found.flatten(2)


def with_bias(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """query, key [1, H, T, D], with MORE numbers before theirs: the product of query i and key j grows by UNIT times
    bias[j] - bias[i]; bias fp32 [T, H]."""
    rest, parts = bias.t().unsqueeze(0), []
    for _ in range(PARTS):
        parts.append(rest.to(key.dtype))
        rest = rest - parts[-1].float()
    ones = torch.full_like(parts[0], UNIT)
    # Each part of a key's bias stands beside that of the query's, so that sums stay small on their way.
    of_query = torch.stack([each for part in parts for each in (ones, -part)], dim=3)
    of_key = torch.stack([each for part in parts for each in (part, ones)], dim=3)
    none = query.new_zeros((*query.shape[:3], MORE - 2 * PARTS))
    return torch.cat([of_query, none, query], dim=3), torch.cat([of_key, none, key], dim=3)


def _split(fused: torch.Tensor, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits fused states [1, T, heads * (queries + 2) * dim], where each KV head's queries stand before its key and
    its value: query [1, H, T, dim], key and value [1, heads, T, dim]."""
    parts = fused.view(*fused.shape[:2], heads, -1, dim)
    query, key, value = parts[:, :, :, :-2].flatten(2, 3), parts[:, :, :, -2], parts[:, :, :, -1]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _heads(states: torch.Tensor, dim: int) -> torch.Tensor:
    """[1, T, heads * dim] as [1, heads, T, dim]."""
    return states.view(*states.shape[:2], -1, dim).transpose(1, 2)


def _projected(
    hidden_states: torch.Tensor, query: Any, key: Any, value: Any, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [1, H, T, dim] by three projections."""
    return _heads(query(hidden_states), dim), _heads(key(hidden_states), dim), _heads(value(hidden_states), dim)


def _alibi_slopes(module: Any, config: Any) -> torch.Tensor:
    """As Bloom's and Falcon's modelling code makes them."""
    two = torch.ones(1, 2, dtype=torch.int64)
    made: torch.Tensor = _library(module).build_alibi_tensor(two, config.num_attention_heads, torch.float32)
    return made[:, 0, 1]


def _library(module: Any) -> Any:
    """The library's functions beside the module's class."""
    return sys.modules[type(module).__module__]


class Falcon(OlderAttention):
    def slopes_of(self, config: Any) -> torch.Tensor | None:
        return _alibi_slopes(self.module, config) if config.alibi else None

    def bias(self, positions: torch.Tensor) -> torch.Tensor:
        # Rounded as Falcon was trained, whatever type computes; and scaled with the scores.
        rounded = (positions.unsqueeze(1) * self.slopes.bfloat16()).float()
        scaled: torch.Tensor = rounded * self.module.inv_norm_factor
        return scaled

    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer = self.module
        query, key, value = _split(layer.query_key_value(hidden_states), layer.num_kv_heads, layer.head_dim)
        if self.slopes is None:
            query, key = _library(layer).apply_rotary_pos_emb(query, key, *more["position_embeddings"])
        return layer.dense(self.attend(query, key, value, layer.inv_norm_factor)), None


class Bloom(OlderAttention):
    def slopes_of(self, config: Any) -> torch.Tensor | None:
        return _alibi_slopes(self.module, config)

    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer, (residual, *_) = self.module, given
        states = _split(layer.query_key_value(hidden_states), layer.num_heads, layer.head_dim)
        return residual + layer.dense(self.attend(*states, layer.inv_norm_factor)), None


class Mpt(OlderAttention):
    def slopes_of(self, config: Any) -> torch.Tensor | None:
        made: torch.Tensor = _library(self.module).build_mpt_alibi_tensor(config.n_heads, 2)
        return -made[:, 0, 0]

    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer = self.module
        fused = layer.Wqkv(hidden_states)
        if layer.clip_qkv:
            fused = fused.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
        query, key, value = (_heads(each, layer.head_dim) for each in fused.chunk(3, dim=2))
        return layer.out_proj(self.attend(query, key, value, layer.softmax_scale)), None


class GPTNeo(OlderAttention):
    """Its masks are tables of all pairs of positions, made as it is loaded; here they are made when they are read."""

    def __init__(self, module: Any, index: int, config: Any) -> None:
        super().__init__(module, index, config)
        self.sliding_window: int | None = config.window_size if module.attention_type == "local" else None
        del module._buffers["bias"]

    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer = self.module
        states = _projected(hidden_states, layer.q_proj, layer.k_proj, layer.v_proj, layer.head_dim)
        return layer.out_proj(self.attend(*states, 1.0, self.sliding_window)), None

    def library(self, *given: Any, **more: Any) -> Any:
        count = given[0].shape[1]
        seen = torch.ones(1, 1, count, count, dtype=torch.bool, device=given[0].device).tril()
        if self.sliding_window is not None:
            seen = seen ^ seen.tril(-self.sliding_window)
        self.module.bias = seen
        return self.module(*given, **more)


class GPTNeoXJapanese(OlderAttention):
    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer = self.module
        turned, rotate = layer.rotary_ndims, _library(layer).apply_rotary_pos_emb
        query, key, value = _split(layer.query_key_value(hidden_states), layer.num_attention_heads, layer.head_size)
        both = rotate(query[..., :turned], key[..., :turned], *more["position_embeddings"])
        rest = query[..., turned:], key[..., turned:]
        query, key = (torch.cat(parts, dim=3) for parts in zip(both, rest, strict=True))
        return layer.dense(self.attend(query, key, value, 1.0 / layer.norm_factor)), None, layer.dense_bias


class XGLM(OlderAttention):
    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer = self.module
        states = _projected(hidden_states, layer.q_proj, layer.k_proj, layer.v_proj, layer.head_dim)
        return layer.out_proj(self.attend(*states, layer.scaling)), None


class OpenAIGPT(OlderAttention):
    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer, dim = self.module, hidden_states.shape[2] // self.module.n_head
        query, key, value = (_heads(each, dim) for each in layer.c_attn(hidden_states).split(layer.split_size, dim=2))
        return [layer.c_proj(self.attend(query, key, value, dim**-0.5))]


class Bert(OlderAttention):
    """RemBERT and Megatron's BERT, as decoders."""

    def __init__(self, module: Any, index: int, config: Any) -> None:
        super().__init__(module, index, config)
        self.is_causal = bool(config.is_decoder)

    def planned(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
        layer, dim = self.module, self.module.attention_head_size
        states = _projected(hidden_states, layer.query, layer.key, layer.value, dim)
        return self.attend(*states, dim**-0.5), None


class Older(NamedTuple):
    """Configuration by which a family is served."""

    layer: str
    """Class of its attention layers."""
    kind: Callable[[Any, int, Any], OlderAttention]
    reference: str = "eager"
    """The attention of the library that its own passes take."""


OLDER: Mapping[str, Older] = {
    # Falcon's eager pass adds ALiBi's bias twice, to mask and scores; the one that the library takes by itself, once.
    "falcon": Older("FalconAttention", Falcon, "sdpa"),
    "bloom": Older("BloomAttention", Bloom),
    "mpt": Older("MptAttention", Mpt),
    "gpt_neo": Older("GPTNeoSelfAttention", GPTNeo),
    "gpt_neox_japanese": Older("GPTNeoXJapaneseAttention", GPTNeoXJapanese),
    "xglm": Older("XGLMAttention", XGLM),
    "openai-gpt": Older("Attention", OpenAIGPT),
    "rembert": Older("RemBertSelfAttention", Bert),
    "megatron-bert": Older("MegatronBertSelfAttention", Bert),
}
"""By `model_type`."""


def adapt(model: Any) -> None:
    """Replaces the attention layers of a model that is in OLDER; leaves any other as it is."""
    family = OLDER.get(model.config.model_type)
    if family is None:
        return
    found = [(name, each) for name, each in model.named_modules() if type(each).__name__ == family.layer]
    for place, (name, each) in enumerate(found):
        index = getattr(each, "layer_idx", getattr(each, "layer_id", place))
        model.set_submodule(name, family.kind(each, index, model.config))
    for each in model.modules():
        if type(each).__name__ == "FalconLinear":  # rounds before it adds the bias; a layer is packed that does not
            each.__class__ = nn.Linear


def attention_is_older(model: Any) -> bool:
    """True where no `attn_implementation` decides who attends, but the plan of a step alone."""
    return model.config.model_type in OLDER


def knows_positions_by_order(model: Any) -> bool:
    """True where the library computes positions from the order of tokens, and `position_ids` change nothing."""
    return any(isinstance(each, OlderAttention) and each.slopes is not None for each in model.modules())
