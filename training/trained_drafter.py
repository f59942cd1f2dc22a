"""Interface between the training of a drafter and its kind: `draft.py`, `medusa.py` and `eagle.py` have one class each.

Root t of a text is its token t + 1, the last one known; the candidate at depth d (from 0) stands for token t + 2 + d.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.proposers.parallel_drafting import RANKS
from training.corpus import TrainingBatch
from training.target import TargetStates

UNKNOWN = -1
"""Rank of what the text does not reach."""


class TrainedDrafter(Protocol):
    @property
    def module(self) -> nn.Module:
        """In fp32; parameters that require gradients learn."""
        ...

    layers: tuple[int, ...]
    """The target's layers whose hidden states are read."""
    depth: int
    passes: int
    """Passes of the drafter, one behind the other, for one round."""
    layout: str
    """The format that `save` writes, in a few words."""

    def calibrate(self, batch: TrainingBatch, states: TargetStates) -> None:
        """Fits a fresh drafter's scales to the target's states of some rows."""
        ...

    def loss(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        """Mean in nats per position, summed over depths."""
        ...

    def ranks(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        """int64 [depth, B, T]: the rank of the text's token among the candidates of each root, whose earlier candidates
        were the text's; UNKNOWN where the text ends."""
        ...

    def one_pass(self) -> None:
        """Computes one of `passes`, to be timed."""
        ...

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        """Writes the published format; `accuracy` [depth][RANKS] as measured."""
        ...


def rank_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """int64 [...]: how many tokens are likelier than this one, counted up to RANKS; logits [..., vocabulary]."""
    own = logits.gather(-1, tokens[..., None])
    better = (logits > own).sum(-1).clamp(max=RANKS)
    return torch.where(own[..., 0].isneginf(), RANKS, better)


def shifted(values: Tensor, by: int, fill: int | bool) -> Tensor:
    """[B, T] moved `by` places to the left."""
    moved = torch.full_like(values, fill)
    moved[:, : values.shape[1] - by] = values[:, by:]
    return moved


def reached(ranks: Tensor, batch: TrainingBatch, depth: int) -> Tensor:
    """The ranks [B, T] of one depth, UNKNOWN where the root's candidate is no token that is learned."""
    assert batch.learned is not None
    return torch.where(shifted(batch.learned, 2 + depth, False), ranks, UNKNOWN)
