"""The likeliest tokens of a few rows: a dozen operators of torch take longer than reading the logits."""

from __future__ import annotations

import torch

from slipstream.engine.kernels.compiled import find_kernels

MOST_RANKS = 64


def ranks(logits: torch.Tensor, count: int) -> bool:
    """True if there is a kernel for the `count` best of these logits."""
    fits = logits.is_cpu and logits.dtype is torch.float32 and count <= min(MOST_RANKS, logits.shape[-1])
    return fits and find_kernels() is not None


def rank_likeliest(logits: torch.Tensor, count: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [R, V] for which there is a kernel -> (tokens int64 [R, count], confidences float32 [R, count]).

    Best first, ties to the lowest id. The confidence is the log-softmax of `sharpness` * logits. Where fewer tokens are
    possible, and in rows with NaN or +inf, the token is -1 and the confidence -inf.
    """
    kernels = find_kernels()
    assert kernels is not None
    logits = logits.contiguous()
    rows, width = logits.shape
    tokens = torch.empty(rows, count, dtype=torch.int64)
    confidences = torch.empty(rows, count)
    kernels.rank(logits.data_ptr(), rows, width, count, sharpness, tokens.data_ptr(), confidences.data_ptr())
    return tokens, confidences
