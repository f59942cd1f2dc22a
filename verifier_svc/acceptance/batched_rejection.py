"""The rule `rejection` on the chains of many sessions at once, on the device where their logits are.

The rule itself, and why it is exact, stand in `rejection`; on a chain a node has one child at most. All rows of a chain
are looked at together, also those behind the first rejection, and nothing is fetched from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler import torch_noise
from slipstream.speculation.noise import Purpose

NO_DRAFT = -2
"""Stands for the candidate behind the last row of a chain; no choice equals it."""
Indices = npt.NDArray[np.int64]


class Chains(NamedTuple):
    """N chains in R rows, those of a chain one after the other: after the prefix, then after each candidate."""

    counts: Indices
    """[N] candidates of each chain."""
    drafts: Tensor
    """int64 [R] the candidate behind each row, or NO_DRAFT."""
    seeds: npt.NDArray[np.uint64]
    """[R]"""
    positions: Indices
    """[R] index of the token that the row decides."""

    @property
    def starts(self) -> Indices:
        """[N] the first row of each chain."""
        return first_rows(self.counts)


class Drawn(NamedTuple):
    """P tokens with positive weight in the distributions that candidates were drawn from. A candidate without any was
    not drawn: its q is one-hot."""

    rows: Indices
    """[P] the row whose candidate it is."""
    token_ids: Indices
    weights: Indices


class Judged(NamedTuple):
    accepted: Tensor
    """bool [R]; never on the last row of a chain. Those behind a chain's first False mean nothing."""
    next_tokens: Tensor
    """int64 [N] the token after the accepted ones."""
    dishonest: Tensor
    """bool [N] a candidate that was looked at lay outside its own q."""


def reject(p: Tensor, chains: Chains, drawn: Drawn) -> Judged:
    """p: float64 [R, V], each row the target's processed distribution. Rows with NaN are never accepted."""
    device, size = p.device, len(chains.counts)
    starts = upload(torch.from_numpy(chains.starts), device)
    drafts, tokens = chains.drafts, chains.drafts.clamp(min=0)
    exists = drafts >= 0
    rows, ids, weights = (upload(torch.from_numpy(array), device) for array in drawn)
    empty = torch.zeros(len(p), dtype=torch.float64, device=device)
    totals = empty.index_add(0, rows, weights.double())
    own = empty.index_add(0, rows, torch.where(ids == drafts[rows], weights, 0).double())
    q = torch.where(totals > 0.0, own / totals, 1.0)
    lies = exists & (q <= 0.0)
    coins = upload(_uniform(chains, Purpose.ACCEPT), device)
    reached = (p.gather(1, tokens[:, None])[:, 0] / q).clamp(max=1.0)
    accepted = exists & ~lies & (coins < reached)

    stop = starts + leading(accepted, chains.counts)
    rejected = exists[stop] & ~lies[stop]
    target, number = p[stop], torch.arange(size, device=device)
    # What does not apply is written into a row that is never read.
    left = torch.cat([target, target.new_zeros(1, p.shape[-1])])
    owners = upload(torch.from_numpy(np.repeat(np.arange(size), chains.counts + 1)), device)
    owner = owners[rows]
    counts_here = (rows == stop[owner]) & rejected[owner]
    minus = (target[owner, ids] - weights / totals[rows]).clamp(min=0.0)
    left[torch.where(counts_here, owner, size), ids] = minus
    left[torch.where(rejected & (totals[stop] == 0.0), number, size), tokens[stop]] = 0.0
    left = left[:size]
    left = torch.where(left.any(dim=-1, keepdim=True), left, target)
    is_last = np.zeros(len(p), np.bool_)
    is_last[chains.starts + chains.counts] = True
    bonus, residual = _keys(chains, Purpose.BONUS), _keys(chains, Purpose.RESIDUAL)
    keys = upload(torch.where(torch.from_numpy(is_last), bonus, residual), device)[stop, None]
    scores = torch_noise.gumbel(keys, torch.arange(p.shape[-1], device=device))
    return Judged(accepted, scores.add_(left.log_()).argmax(dim=-1), lies[stop])


def first_rows(counts: Indices) -> Indices:
    """[N] the first row of each chain, of so many candidates [N]."""
    return np.cumsum(counts + 1) - counts - 1


def leading(accepted: Tensor, counts: Indices) -> Tensor:
    """bool [R], False on the last row of each chain, and candidates of each [N] -> int64 [N] how many are accepted
    before the first that is not."""
    columns = np.arange(int(counts.max(initial=0)) + 1)
    at = torch.from_numpy(first_rows(counts)[:, None] + np.minimum(columns, counts[:, None]))
    return accepted[upload(at, accepted.device)].cumprod(dim=-1).sum(dim=-1)


def _keys(chains: Chains, purpose: Purpose) -> Tensor:
    return torch_noise.keys(chains.seeds, chains.positions, purpose)


def _uniform(chains: Chains, purpose: Purpose) -> Tensor:
    keys = _keys(chains, purpose)
    return torch_noise.uniform(keys, torch.zeros_like(keys))
