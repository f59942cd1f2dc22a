"""Log-probabilities of tokens that were chosen, and of the likeliest ones in their places."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.speculation.sampling_params import TokenLogprobs


def logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Raw logits [R, V], the token chosen in each row, and how many of the likeliest each row wants."""
    logits = logits.float()
    shares = logits - logits.logsumexp(dim=-1, keepdim=True)
    chosen = shares.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]).flatten().tolist()
    best = _best(shares, tops)
    return [TokenLogprobs(logprob, top) for logprob, top in zip(chosen, best, strict=True)]


def _best(shares: Tensor, tops: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """All that reach the last one's value are looked at, for which of equal ones `topk` takes is not said."""
    best: list[list[tuple[float, int]]] = [[] for _ in tops]
    width = min(max(tops), shares.shape[-1])
    if width:
        last = shares.topk(width, dim=-1).values[:, -1:]
        rows, ids = (shares >= last).nonzero(as_tuple=True)
        for row, token, share in zip(rows.tolist(), ids.tolist(), shares[rows, ids].tolist(), strict=True):
            best[row].append((-share, token))
    return [tuple((token, -cost) for cost, token in sorted(found)[:top]) for found, top in zip(best, tops, strict=True)]
