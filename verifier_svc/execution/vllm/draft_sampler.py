"""Samples for vLLM's speculators: a draft token is the one that the target would choose if it had the draft's logits,
under the session's temperature and with the noise of the token's position. So a draft that is nearly right is accepted
at temperature 1 nearly as often as at 0.

All of it stays on the device, in tensors that keep their addresses: it may be part of a captured CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler import torch_noise
from slipstream.speculation.noise import Purpose
from slipstream.speculation.sampling_params import SamplingParams

SHORTLIST = 256
"""Likeliest tokens of a row among which its choice is made."""
UNKNOWN = math.log(0.5)
"""Log-probability of draft tokens for which a speculator computes none here; calibration learns what they are worth."""


class DraftSampler:
    """Owned by one worker. P places of requests, D draft tokens of each."""

    def __init__(self, places: int, depth: int, device: torch.device) -> None:
        self._seeds = torch.zeros(places, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(places, device=device)
        self._noisy = torch.zeros(places, device=device)
        """0 for greedy sessions, else 1."""
        self._log_probs = torch.full((places + 1, depth), UNKNOWN, device=device)
        """The last row is of no request."""

    def begin(self, places: Sequence[int], sampling: Sequence[SamplingParams]) -> None:
        """Requests took these places."""
        if not places:
            return
        device = self._seeds.device
        greedy = [each.greedy or each.drawn for each in sampling]
        columns = torch.tensor([1.0 if g else each.temperature for g, each in zip(greedy, sampling, strict=True)])
        there = upload(torch.tensor(places), device)
        self._seeds[there] = upload(torch_noise.mixed([each.seed for each in sampling]), device)
        self._temperatures[there] = upload(columns, device)
        self._noisy[there] = upload(1.0 - torch.tensor(greedy, dtype=torch.float32), device)

    def choose(
        self, logits: Tensor, places: Tensor, positions: Tensor, column: Tensor, token_ids: Tensor | None = None
    ) -> Tensor:
        """logits [R, V] -> token ids int64 [R]. `places`: of the rows' requests, -1 for none; `positions`: of the
        tokens that they decide; `column`: which draft token it is, for all rows or each; `token_ids` [V]: of the
        columns, where they are not 0, 1, ..."""
        own = places.clamp(min=0)
        values, ids = logits.topk(min(SHORTLIST, logits.shape[-1]), dim=-1)
        names = ids if token_ids is None else token_ids[ids]
        top, heat = values[:, :1].float(), self._temperatures[own][:, None]
        noisy = self._noisy[own][:, None]
        keys = torch_noise.keys_at(self._seeds[own], positions.long(), Purpose.COUPLED)
        scores = ((values.float() - top) / heat).double() + torch_noise.gumbel(keys[:, None], names) * noisy
        best, at = scores.max(dim=-1)
        # A greedy row's confidence is its probability; with known noise it is the choice's share of what may win.
        whole = torch.logsumexp(logits.float() - top, dim=-1)
        normaliser = torch.where(noisy[:, 0] > 0.0, torch.logsumexp(scores, dim=-1).float(), whole)
        rows = torch.where(places < 0, len(self._log_probs) - 1, places).long()
        columns = column.long().expand(len(rows))
        self._log_probs[rows, columns] = (best.float() - normaliser).clamp(max=0.0)
        return names.gather(-1, at[:, None])[:, 0]

    def log_probs(self, places: Tensor) -> Tensor:
        """float32 [N, D] of the draft tokens that were chosen last at these places."""
        return self._log_probs[places.long()]
