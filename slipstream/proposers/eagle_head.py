"""EAGLE's draft layer as a plain torch module, for drafting and for training.

Pair j of a text is (token j + 1, the target's hidden states of token j); the layer turns it into a state from which
the token j + 2 is predicted. To go on beyond the text, the next pair takes that state in place of the target's.

| | EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077, 2406.16858) | EAGLE-3 (Li et al. 2025, arXiv 2503.01840) |
|---|---|---|
| reads of the target | the last hidden state, behind the final norm | several layers' residual stream, through `fc` |
| embedding and hidden state | made one by `fc` | side by side in front of the attention |
| output | the target's head | its own head over a part of the vocabulary |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries [batch, heads, T, size], keys and values [batch, kv heads, T, size] of one call -> [batch, heads, T,
size]. The caller decides what else the queries see: its cache, its tree, its training mask."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    layer: PretrainedConfig
    """Configuration of a Llama or Qwen3 model, whose layer the head has."""
    target_width: int
    """Width of the target's hidden states."""
    layers: tuple[int, ...] = ()
    """Numbers of the target's layers (`slipstream.engine.engine.HiddenRequest`), in the order in which `fc` takes them;
    none: EAGLE-1, which reads the last hidden state."""
    draft_vocabulary: int = 0
    """Tokens that EAGLE-3's own head knows."""
    fc_bias: bool = False
    norm_before_residual: bool = False
    """The residual carries the normed hidden state."""
    norm_before_fc: bool = False
    """One norm over all layers' states side by side."""
    fc_norm: bool = False
    """One norm for each layer's state."""
    norm_output: bool = False
    """The state that is fed back is the normed one (EAGLE-3.1)."""

    @property
    def width(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def vocabulary(self) -> int:
        return int(self.layer.vocab_size)

    @property
    def window(self) -> int:
        """Pairs that a pair sees, itself included; 0 for all."""
        kinds = getattr(self.layer, "layer_types", None) or ["full_attention"]
        return int(self.layer.sliding_window) if kinds[0] == "sliding_attention" else 0


class DraftAttention(nn.Module):
    """A Llama's or Qwen3's, over inputs of any width."""

    def __init__(self, layer: PretrainedConfig, inputs: int) -> None:
        super().__init__()
        self.size = int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        bias = bool(getattr(layer, "attention_bias", False) or getattr(layer, "qkv_bias", False))
        self.q_proj = nn.Linear(inputs, layer.num_attention_heads * self.size, bias=bias)
        self.k_proj = nn.Linear(inputs, layer.num_key_value_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(inputs, layer.num_key_value_heads * self.size, bias=bias)
        o_bias = bool(getattr(layer, "attention_bias", False))
        self.o_proj = nn.Linear(layer.num_attention_heads * self.size, layer.hidden_size, bias=o_bias)
        if layer.model_type == "qwen3":
            self.q_norm, self.k_norm = (LlamaRMSNorm(self.size, layer.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        queries = self.q_proj(x).unflatten(-1, (-1, self.size))
        if hasattr(self, "q_norm"):
            queries = self.q_norm(queries)
        keys, values = self.keys_and_values(x, rotation)
        found: Tensor = self.o_proj(attend(_rotated(queries, rotation), keys, values).transpose(1, 2).flatten(2))
        return found

    def keys_and_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[batch, kv heads, T, size] each, the keys rotated."""
        keys, values = (each(x).unflatten(-1, (-1, self.size)) for each in (self.k_proj, self.v_proj))
        if hasattr(self, "k_norm"):
            keys = self.k_norm(keys)
        return _rotated(keys, rotation), values.transpose(1, 2)


def _rotated(rows: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[batch, heads, T, size] from [batch, T, heads, size]."""
    cosine, sine = (each.unsqueeze(1) for each in rotation)
    turned = rows.transpose(1, 2)
    found: Tensor = turned * cosine + rotate_half(turned) * sine
    return found


class DraftMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class _Layer(nn.Module):
    """Parameters are called as in `speculators` checkpoints."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        width, eps = config.width, config.layer.rms_norm_eps
        self.self_attn = DraftAttention(config.layer, 2 * width if config.layers else width)
        self.mlp = DraftMLP(width, config.layer.intermediate_size)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        if config.layers:
            self.input_layernorm, self.hidden_norm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)


class EagleHead(nn.Module):
    """One draft layer with its embeddings and its output, of either kind. Everything is batch first."""

    target_ids: Tensor
    """int64 [output rows]: the target's token of each row of the output."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        width, layer = config.width, config.layer
        self.embed_tokens = nn.Embedding(config.vocabulary, width).requires_grad_(False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.rotary = LlamaRotaryEmbedding(layer)
        inputs = len(config.layers) * config.target_width if config.layers else 2 * width
        self.fc = nn.Linear(inputs, width, bias=config.fc_bias)
        rows = config.draft_vocabulary if config.layers else config.vocabulary
        self.lm_head = nn.Linear(width, rows, bias=False).requires_grad_(bool(config.layers))
        self.register_buffer("target_ids", torch.arange(rows), persistent=False)
        if config.layers:
            self.norm = LlamaRMSNorm(width, layer.rms_norm_eps)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(inputs, layer.rms_norm_eps)
        if config.fc_norm:
            norms = [LlamaRMSNorm(config.target_width, layer.rms_norm_eps) for _ in config.layers]
            self.fc_norm = nn.ModuleList(norms)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., width] what `forward` takes of the target: from [..., layers * target width] for EAGLE-3, for EAGLE-1
        the last hidden states [..., target width] as they are."""
        config = self.config
        if not config.layers:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.split(config.target_width, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend | None = None) -> Tensor:
        """States [batch, T, width] of the pairs (tokens int64 [batch, T], hidden [batch, T, width] from `fuse` or from
        the pass before), at positions int64 [batch, T]: `logits` reads them, and so does the next pass. Without
        `attend` the rows are one whole text."""
        config = self.config
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        embedded = self.embed_tokens(tokens).to(hidden.dtype)
        if config.layers:
            normed = layer.hidden_norm(hidden)
            residual = normed if config.norm_before_residual else hidden
            inputs = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
        else:
            residual = inputs = self.fc(torch.cat((embedded, hidden), dim=-1))
        states: Tensor = residual + layer.self_attn(inputs, self.rotary(inputs, positions), attend or self._causal)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        return self.norm(states) if config.norm_output else states

    def _causal(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = torch.arange(queries.shape[2], device=queries.device)
        before = rows[:, None] - rows[None]
        mask = (before >= 0) & (before < (self.config.window or len(rows)))
        return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    def logits(self, states: Tensor) -> Tensor:
        """[..., output rows] of the tokens `target_ids`, from states of `forward`."""
        found: Tensor = self.lm_head(self.normed(states))
        return found

    def normed(self, states: Tensor) -> Tensor:
        """States of `forward` as the output reads them."""
        found: Tensor = self.norm(states) if self.config.layers and not self.config.norm_output else states
        return found

    def target_logits(self, states: Tensor) -> Tensor:
        """float32 [..., vocabulary]: -inf for tokens that the output does not know."""
        known = self.logits(states).float()
        if known.shape[-1] == self.config.vocabulary:
            return known
        every = known.new_full((*known.shape[:-1], self.config.vocabulary), -torch.inf)
        return every.index_copy_(-1, self.target_ids, known)
