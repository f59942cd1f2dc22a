"""The drafter's half of the honest sparse q: truncate, quantise, and only then draw from exactly what is sent.

Draws below one node are without replacement: the largest of log w + g, with one Gumbel noise g for each token, come in
the law and in the order of drawing one after the other, each from what the ones before it left (Gumbel top-k: Vieira
2014; Kool, van Hoof and Welling 2019, arXiv 1903.06059).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slipstream.engine.devices import upload
from slipstream.engine.sampler import torch_noise
from slipstream.speculation.draft_distribution import MAX_WEIGHT, DraftDistribution
from slipstream.speculation.noise import Purpose


def quantise(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Processed logits float32 [R, V] -> (token ids int64 [R, m], integer weights int64 [R, m]), m = min(top, V).

    The most likely token weighs 65535, every other possible one at least 1, an impossible one (-inf) 0. q is
    weights / sum(weights). A row with NaN or no finite logit has no weights at all.
    """
    values, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
    shares = (values - values[:, :1]).exp_().nan_to_num_(0.0)
    weights = shares.mul_(MAX_WEIGHT).round_().long()
    return ids, weights.clamp_(min=1).masked_fill_(~values.isfinite(), 0)


def draw(ids: Tensor, weights: Tensor, streams: Sequence[int], nodes: Sequence[int], count: int = 1) -> Tensor:
    """Up to `count` different tokens of each row, in the order of drawing: the first with probability weights /
    sum(weights), each further one from what is left -> int64 [R, min(count, m)].

    The noise is that of (stream, node, DRAFT). -1 where no possible token is left, so everywhere in a row without
    weights.
    """
    keys = upload(torch_noise.keys(streams, nodes, Purpose.DRAFT), ids.device)
    scores = weights.double().log_() + torch_noise.gumbel(keys[:, None], ids)
    best, winners = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return ids.gather(-1, winners).masked_fill_(best.isneginf(), -1)


def pack(ids: Tensor, weights: Tensor) -> list[DraftDistribution | None]:
    """Rows as they travel; None for a row without weights."""
    rows = zip(ids.tolist(), weights.tolist(), strict=True)
    return [_packed(row_ids, row_weights) for row_ids, row_weights in rows]


def _packed(ids: list[int], weights: list[int]) -> DraftDistribution | None:
    size = sum(weight > 0 for weight in weights)  # the impossible ones stand last
    return DraftDistribution(tuple(ids[:size]), tuple(weights[:size])) if size else None
