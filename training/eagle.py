"""EAGLE's draft layer with the training-time test of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): it reads its own
states in training as it will when it drafts.

Pass d gives the layer the text's tokens moved by d and, for d > 0, its own states of the pass before. A row of pass d
sees the pairs of the text up to its root, which carry the target's states, and its own rows of the passes 1 .. d.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from slipstream.engine.engine import HiddenStates
from slipstream.errors import InvalidArgument
from slipstream.proposers.eagle import fuse
from slipstream.proposers.eagle_checkpoint import default_layers, open_head, save_head
from slipstream.proposers.eagle_head import EagleConfig
from slipstream.proposers.head_file import FAMILIES, read_target
from slipstream.proposers.parallel_drafting import RANKS
from training.corpus import TrainingBatch
from training.folder import replacing
from training.loss import divergence
from training.request import TrainRequest
from training.target import Target, TargetStates
from training.trained_drafter import rank_of, reached, shifted

WIDTH = 4
"""Candidates that a pass of drafting expands."""


class Eagle:
    def __init__(self, request: TrainRequest, target: Target, frequency: Tensor) -> None:
        self._request, self._target = request, target.name
        known = read_target(target.name)
        count, vocabulary = known.layer_count, known.vocabulary
        self.layers = (request.aux_layers or _layers_of(count)) if request.version == 3 else ()
        if any(not 0 <= each < count for each in self.layers):
            raise InvalidArgument(f"aux_layers is {list(self.layers)}; the target has layers 0 to {count - 1}.")
        ids = None
        if request.version == 3 and 0 < request.draft_vocabulary < vocabulary:
            ids = frequency.topk(request.draft_vocabulary).indices.sort().values
        config = EagleConfig(
            layer=_layer_of(target, request.feed_forward),
            target_width=known.output.shape[1],
            layers=self.layers,
            draft_vocabulary=0 if request.version == 1 else vocabulary if ids is None else len(ids),
            norm_before_residual=request.version == 3,
        )
        self.module = open_head(config, known, ids).float()
        self.module.embed_tokens.requires_grad_(False)
        self.depth = self.passes = request.depth
        self.layout = "EAGLE-3 of speculators" if self.layers else "EAGLE-1"

    def loss(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        assert batch.learned is not None
        kind = self._request.late_loss if batch.used >= self._request.late_from else "kl"
        ids = self.module.target_ids
        partial = bool(self.layers) and len(ids) < states.logits.shape[-1]
        known = torch.ones_like(batch.learned)
        if partial:  # what the target would say must be something that the output can say
            known = torch.isin(states.logits.argmax(-1), ids)
        total = states.last.new_zeros((), dtype=torch.float32)
        for depth, own in enumerate(self._passes(batch, states)):
            roots = shifted(batch.learned, 2 + depth, False) & shifted(known, 1 + depth, False)
            rows, places = roots.nonzero(as_tuple=True)
            if not len(rows):
                continue
            wanted = states.logits[rows, places + 1 + depth]
            found = divergence(self.module.logits(own[roots]), wanted[:, ids] if partial else wanted, kind)
            total = total + self._request.decay**depth * found.mean()
        return total

    def ranks(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        found = []
        for depth, own in enumerate(self._passes(batch, states)):
            tokens = shifted(batch.tokens, 2 + depth, 0)
            found.append(reached(rank_of(self.module.target_logits(own), tokens), batch, depth))
        return torch.stack(found)

    def _passes(self, batch: TrainingBatch, states: TargetStates) -> list[Tensor]:
        """[depth] states [B, T, width] of the rows of each pass."""
        rows, length = batch.tokens.shape
        features = HiddenStates(states.last, states.layers)
        hidden, attention, found = fuse(self.module, features), _TestedAttention(self.module.config.window), []
        positions = torch.arange(length, device=batch.tokens.device).expand(rows, length)
        for depth in range(self.depth):
            hidden = self.module(shifted(batch.tokens, 1 + depth, 0), hidden, positions + depth, attention)
            found.append(hidden)
        return found

    def one_pass(self) -> None:
        width, place = self.module.config.width, self.module.target_ids.device
        tokens = torch.zeros(1, WIDTH, dtype=torch.int64, device=place)
        hidden, positions = torch.zeros(1, WIDTH, width, device=place), torch.arange(WIDTH, device=place)[None]
        self.module.logits(self.module(tokens, hidden, positions)).topk(RANKS)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        with replacing(folder) as fresh:
            place = self.module.target_ids.device
            save_head(self.module.to("cpu", torch.bfloat16), fresh, self._target)
            self.module.to(place, torch.float32)


def _layers_of(count: int) -> tuple[int, ...]:
    """An early, a middle and a late one: of few layers later ones than usual, for a layer is much of them."""
    if count <= 3:
        return tuple(range(count))
    return default_layers(count) if count >= 10 else (1, count // 2, count - 1)


class _TestedAttention:
    """Attention of one row to the text's pairs and to its own rows of earlier passes; called once for each pass."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Rotated [B, heads, T, size] -> the same shape."""
        groups = queries.shape[1] // keys.shape[1]
        self._keys.append(keys.repeat_interleave(groups, dim=1))
        self._values.append(values.repeat_interleave(groups, dim=1))
        length, depth = queries.shape[2], len(self._keys) - 1
        places = torch.arange(length, device=queries.device)
        before = places[:, None] - places[None]
        mask = (before >= 0) & (before + depth < (self._window or length + depth))
        if not depth:
            return scaled_dot_product_attention(queries, self._keys[0], self._values[0], attn_mask=mask)
        scale = queries.shape[-1] ** -0.5
        text = (queries @ self._keys[0].transpose(-1, -2)) * scale
        text = text.masked_fill(~mask, -torch.inf)
        visible = range(max(1, depth + 1 - (self._window or depth + 1)), depth + 1)
        own = torch.stack([(queries * self._keys[each]).sum(-1) * scale for each in visible], dim=-1)
        shares = torch.cat((text, own), dim=-1).float().softmax(-1).to(values.dtype)
        found = shares[..., :length] @ self._values[0]
        for at, each in enumerate(visible):
            found = found + shares[..., length + at, None] * self._values[each]
        return found


def _layer_of(target: Target, feed_forward: int) -> AutoConfig:
    """A Llama's or Qwen3's configuration with the widths of the target's layers."""
    own = target.model.config.get_text_config()
    family = own.model_type if own.model_type in FAMILIES else "llama"
    rotation = getattr(own, "rope_parameters", None)
    named = rotation if rotation and "rope_theta" in rotation else {"rope_type": "default", "rope_theta": 10000.0}
    return AutoConfig.for_model(
        family,
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=feed_forward or own.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads,
        head_dim=getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=getattr(own, "rms_norm_eps", 1e-6),
        rope_parameters=dict(named),
        tie_word_embeddings=False,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
    )
