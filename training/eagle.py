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
from slipstream.proposers.eagle_head import EagleConfig, EagleHead
from slipstream.proposers.head_file import FAMILIES, read_target
from slipstream.proposers.parallel_drafting import RANKS
from training.corpus import TrainingBatch
from training.eagle_start import start_head
from training.folder import replacing
from training.loss import distilled
from training.request import TrainRequest
from training.target import Target, TargetStates
from training.trained_drafter import rank_of, reached, shifted

WIDTH = 4
"""Candidates that a pass of drafting expands."""


class Eagle:
    def __init__(self, request: TrainRequest, target: Target, frequency: Tensor) -> None:
        self._request, self._target = request, target.name
        known = read_target(target.name)
        vocabulary = known.vocabulary
        self.layers = layers_read(request, target)
        ids = None
        if request.version == 3 and 0 < request.draft_vocabulary < vocabulary:
            ids = likeliest(frequency, request.draft_vocabulary)
        config = EagleConfig(
            layer=_layer_of(target, request),
            target_width=known.output.shape[1],
            layers=self.layers,
            draft_vocabulary=0 if request.version == 1 else vocabulary if ids is None else len(ids),
            norm_before_residual=request.version == 3,
            fc_norm=request.version == 3,
        )
        self.module = open_head(config, known, ids).float()
        self.module.embed_tokens.requires_grad_(False)
        if not request.learn_output:
            self.module.lm_head.requires_grad_(False)
        self._known = target
        self.load(self.module)
        self.depth = self.passes = request.depth
        self.layout = "EAGLE-3 of speculators" if self.layers else "EAGLE-1"

    def load(self, head: EagleHead) -> None:
        """Takes another head of the same layers."""
        self.module, ids = head, head.target_ids.to(self._known.device)
        self._output_rows = torch.full((head.config.vocabulary,), -1, device=self._known.device)
        """[vocabulary] the row of each token in the output, or -1."""
        self._output_rows[ids] = torch.arange(len(ids), device=self._known.device)

    @torch.no_grad()
    def calibrate(self, batch: TrainingBatch, states: TargetStates) -> None:
        """A fresh head of version 3 gets a start in closed form."""
        if not self.layers or self.module.config.width != states.last.shape[-1]:
            return
        read = HiddenStates(states.last.float(), {number: rows.float() for number, rows in states.layers.items()})
        start_head(self.module, read, self.module.embed_tokens(batch.tokens))

    def loss(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        assert batch.learned is not None
        kind = self._request.late_loss if batch.used >= self._request.late_from else "kl"
        ids = self.module.target_ids
        # Place p is where the target predicts token p + 1, which must be learned and one that the output can say.
        said = shifted(batch.learned & (self._output_rows[batch.tokens] >= 0), 1, False)
        rows, places = said.nonzero(as_tuple=True)
        if not len(rows):
            return states.last.sum() * 0.0
        hidden, weights = [], []
        for depth, own in enumerate(self._passes(batch, states)):
            roots = places - 1 - depth
            hidden.append(self.module.normed(own)[rows, roots.clamp(min=0)])
            # A root's candidate stands for a token that is learned; roots may stand in front of those.
            counted = (roots >= 0).float()
            weights.append(self._request.decay**depth * counted / counted.sum().clamp(min=1))
        last, partial = states.last[rows, places], len(ids) < self._known.vocabulary

        def teacher(part: slice) -> Tensor:
            return self._known.logits(last[part], ids if partial else None)

        return distilled(torch.stack(hidden), self.module.lm_head.weight, torch.stack(weights), teacher, kind)

    def ranks(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        found = []
        rows = self._output_rows[batch.tokens]
        for depth, own in enumerate(self._passes(batch, states)):
            place = shifted(rows, 2 + depth, 0)
            counted = rank_of(self.module.logits(own).float(), place.clamp(min=0))
            found.append(reached(torch.where(place >= 0, counted, RANKS), batch, depth))
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


def likeliest(frequency: Tensor, count: int) -> Tensor:
    """int64 [count], ascending: the most frequent tokens. Among equally frequent ones, such as those that the texts do
    not have, those with small numbers: byte-pair vocabularies number frequent pairs first."""
    return torch.sort(frequency, descending=True, stable=True).indices[:count].sort().values


def layers_read(request: TrainRequest, target: Target) -> tuple[int, ...]:
    """The target's layers whose states the request's drafter reads; none but of EAGLE-3. Raises InvalidArgument for
    layers that the target does not have."""
    if request.kind != "eagle" or request.version != 3:
        return ()
    count = int(target.config.num_hidden_layers)
    chosen = request.aux_layers or _layers_of(count)
    if any(not 0 <= each < count for each in chosen):
        raise InvalidArgument(f"aux_layers is {list(chosen)}; the target has layers 0 to {count - 1}.")
    return chosen


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


def _layer_of(target: Target, request: TrainRequest) -> AutoConfig:
    """A Llama's or Qwen3's configuration with the widths of the target's layers."""
    own = target.config
    family = own.model_type if own.model_type in FAMILIES else "llama"
    rotation = getattr(own, "rope_parameters", None)
    named = rotation if rotation and "rope_theta" in rotation else {"rope_type": "default", "rope_theta": 10000.0}
    return AutoConfig.for_model(
        family,
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=request.feed_forward or own.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=own.num_attention_heads,
        num_key_value_heads=request.kv_heads or own.num_key_value_heads,
        head_dim=getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=getattr(own, "rms_norm_eps", 1e-6),
        rope_parameters=dict(named),
        tie_word_embeddings=False,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
    )
