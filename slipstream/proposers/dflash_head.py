"""DFlash's block drafter (Chen et al. 2026, arXiv 2602.06036): a block of tokens from one pass of some draft layers.

The layers see the text as the target saw it: of every committed token the hidden states of several of the target's
layers, made one by `fc`, give keys and values to every draft layer. Queries are the block's alone: the last committed
token, which has no hidden states yet, and masks behind it, which see each other both ways. What comes out of a mask's
row is the distribution of the token in its place.

| layout | configuration | tensors |
|---|---|---|
| the original | a Qwen3's, `block_size`, `dflash_config` | `fc`, `hidden_norm`, `norm`, `layers.{i}.*` |
| that of `speculators` | `transformer_layer_config`, the rest beside it | the same, perhaps `lm_head`, `d2t`, `t2d` |

`target_layer_ids` of the original number the outputs of the target's layers, the last one behind the final norm, as
transformers does; `aux_hidden_state_layer_ids` of `speculators` what enters them, as we do, the last output in front of
that norm. Embeddings are the target's, and its output unless the file has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from slipstream.engine.engine import HiddenStates
from slipstream.proposers.eagle_head import DraftAttention, DraftMLP
from slipstream.proposers.head_file import EMBEDDING, OFFSETS, OUTPUT, HeadFile, HeadTarget, read_layer
from slipstream.proposers.weights import unfit

BlockAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The draft layer's number, rotated queries [1, heads, rows, size], keys and values [1, kv heads, rows, size] of the
blocks -> [1, heads, rows, size]. The caller adds what each block sees of its text."""
NEUTRAL: dict[str, object] = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "is_causal": None,
    "causal": False,
    "sample_from_anchor": False,
    "shift_label": False,
    "projector_type": "dflash",
}
"""Settings of variants, with the value that DFlash has; another one is refused."""


@dataclass(frozen=True, slots=True)
class DflashConfig:
    layer: PretrainedConfig
    """Configuration of a Qwen3 model, whose layers the drafter has."""
    layers: tuple[int, ...]
    """Numbers of the target's layers (`slipstream.engine.engine.HiddenRequest`), in the order in which `fc` takes them;
    their count stands for the last hidden state."""
    target_layers: int
    block: int
    """Rows of a block, the last committed token's included."""
    mask_token: int
    draft_vocabulary: int


class _BlockLayer(nn.Module):
    def __init__(self, layer: PretrainedConfig) -> None:
        super().__init__()
        width = layer.hidden_size
        self.self_attn = DraftAttention(layer, width)
        self.mlp = DraftMLP(width, layer.intermediate_size)
        self.input_layernorm = LlamaRMSNorm(width, layer.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, layer.rms_norm_eps)


class DflashHead(nn.Module):
    """The draft layers with embeddings and output."""

    target_ids: Tensor
    """int64 [output rows]: the target's token of each row of the output."""

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        width = layer.hidden_size
        self.embed_tokens = nn.Embedding(layer.vocab_size, width)
        self.fc = nn.Linear(len(config.layers) * width, width, bias=False)
        self.hidden_norm, self.norm = (LlamaRMSNorm(width, layer.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList([_BlockLayer(layer) for _ in range(layer.num_hidden_layers)])
        self.rotary = LlamaRotaryEmbedding(layer)
        self.lm_head = nn.Linear(width, config.draft_vocabulary, bias=False)
        self.register_buffer("target_ids", torch.arange(config.draft_vocabulary), persistent=False)

    def context(self, states: HiddenStates, first: int) -> tuple[Tensor, Tensor]:
        """[draft layers * kv heads, T, size] keys and values of T committed tokens, from number `first` on."""
        features = [
            states.last if number == self.config.target_layers else states.layers[number]
            for number in self.config.layers
        ]
        fused = self.hidden_norm(self.fc(torch.cat(features, dim=-1).to(self.fc.weight)))[None]
        positions = torch.arange(first, first + fused.shape[1], device=fused.device)[None]
        rotation = self.rotary(fused, positions)
        made = [layer.self_attn.keys_and_values(fused, rotation) for layer in self._layers()]
        keys, values = (torch.cat([each[part][0] for each in made]) for part in range(2))
        return keys, values

    def forward(self, roots: Tensor, positions: Tensor, attend: BlockAttend) -> Tensor:
        """float32 [texts, block - 1, vocabulary]: logits of the tokens behind the root of each text (int64 [texts],
        numbers int64 [texts]); -inf for tokens that the output does not know."""
        config = self.config
        tokens = torch.full((len(roots), config.block), config.mask_token, device=roots.device)
        tokens[:, 0] = roots
        places = positions[:, None] + torch.arange(config.block, device=positions.device)
        states: Tensor = self.embed_tokens(tokens).flatten(0, 1)[None]
        rotation = self.rotary(states, places.flatten()[None])
        for number, layer in enumerate(self._layers()):
            states = states + layer.self_attn(layer.input_layernorm(states), rotation, partial(attend, number))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        masks = self.norm(states)[0].unflatten(0, (len(roots), config.block))[:, 1:]
        known: Tensor = self.lm_head(masks).float()
        if known.shape[-1] == config.layer.vocab_size:
            return known
        every = known.new_full((*known.shape[:-1], config.layer.vocab_size), -torch.inf)
        return every.index_copy_(-1, self.target_ids, known)

    def _layers(self) -> list[_BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, _BlockLayer)]


def load_dflash(name: str, target: HeadTarget, dtype: torch.dtype) -> DflashHead:
    """The drafter in a folder, in this type.

    Raises NotFound without such files, FailedPrecondition for a configuration that cannot be followed and for tensors
    that are missing, left over, of another shape than the target's, not finite, or never trained.
    """
    file = HeadFile.read(name, lambda key: key.removeprefix("model."))
    config = _read_config(file, target)
    with torch.device("meta"):
        head = DflashHead(config)
    head.rotary = type(head.rotary)(config.layer)  # its frequencies are computed, not read
    head.target_ids = file.target_ids(config.draft_vocabulary, target.vocabulary)
    file.fill(head, target, [EMBEDDING] + [OUTPUT] * (config.draft_vocabulary == target.vocabulary), dtype)
    return head


def _read_config(file: HeadFile, target: HeadTarget) -> DflashConfig:
    name, raw = file.name, file.raw
    kind, nested = raw.get("speculators_model_type"), raw.get("dflash_config")
    if kind not in (None, "dflash") or (kind is None and not isinstance(nested, dict)):
        raise unfit(f"{name} is {f'a {kind!r} drafter' if kind else 'no block drafter: it has no dflash_config'}.")
    given = raw | (nested or {})
    for key, value in NEUTRAL.items():
        if given.get(key, value) != value:
            raise unfit(f"{name}: {key} is {given[key]!r}; only drafters with {value!r} are read.")
    fields = raw if kind is None else raw.get("transformer_layer_config") or {}
    layer = read_layer(name, fields | {"model_type": "qwen3"}, target)
    if layer.hidden_size != target.output.shape[1]:
        raise unfit(f"{name} is {layer.hidden_size} wide, the target {target.name} {target.output.shape[1]}; "
                    "it was trained for another model.")  # fmt: skip
    if "sliding_attention" in (getattr(layer, "layer_types", None) or ()):
        raise unfit(f"{name} has layers with a sliding window; only full attention is read.")
    block, mask = given.get("block_size"), given.get("mask_token_id")
    if not isinstance(block, int) or block < 2:
        raise unfit(f"{name}: block_size is {block!r}; a block has at least 2 rows.")
    if not isinstance(mask, int) or not 0 <= mask < target.vocabulary:
        raise unfit(f"{name}: mask_token_id is {mask!r}; the target has tokens 0 to {target.vocabulary - 1}.")
    known = file.tensors.get(OFFSETS)
    rows = target.vocabulary if known is None else len(known)
    return DflashConfig(layer, _layers(name, given, target), target.layer_count, block, mask, rows)


def _layers(name: str, given: dict[str, Any], target: HeadTarget) -> tuple[int, ...]:
    """Numbers of the residual streams that enter a layer."""
    count, outputs, inputs = target.layer_count, given.get("target_layer_ids"), given.get("aux_hidden_state_layer_ids")
    found = inputs if isinstance(inputs, list) else [each + 1 for each in outputs or ()]
    if not found or not all(0 <= each <= count for each in found):
        numbers = [each - 1 for each in found]
        raise unfit(f"{name} reads what the target's layers {numbers} give; {target.name} has 0 to {count - 1}.")
    if found is inputs and count in found:
        raise unfit(f"{name}: aux_hidden_state_layer_ids has {count}, the output of {target.name}'s last layer in "
                    f"front of the final norm; 0 to {count - 1} are read.")  # fmt: skip
    return tuple(found)
