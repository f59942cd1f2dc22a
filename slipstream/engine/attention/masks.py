"""Who sees whom inside one segment, as additive masks."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.engine.segment import Segment

HIDDEN = float("-inf")


def depths(segment: Segment) -> list[int]:
    """Positions of pending tokens and nodes, counted from the sequence's length."""
    last = len(segment.pending) - 1
    found = list(range(last + 1))
    for parent in segment.parents:
        found.append(1 + found[last + 1 + parent])
    return found


def inside_mask(segment: Segment) -> torch.Tensor:
    """[n, n] fp32: a row sees itself and its ancestors; 0 visible, -inf hidden."""
    pending, n = len(segment.pending), segment.tokens
    if segment.parents == list(range(-1, len(segment.nodes) - 1)):
        return torch.full((n, n), HIDDEN).triu_(1)
    seen = np.tril(np.ones((n, n), dtype=bool))
    for node, parent in enumerate(segment.parents, start=pending):
        seen[node, :node] = seen[pending + parent, :node]
    return torch.zeros(n, n).masked_fill_(torch.from_numpy(~seen), HIDDEN)


def segment_mask(
    inside: torch.Tensor, positions: torch.Tensor, start: int, base: int, window: int | None
) -> torch.Tensor:
    """[n, L] over the slots start .. base+n-1. Slots before base hold the token of their own position.

    positions int64 [n] are absolute; a window hides keys `window` or more positions back. It is tested on positions,
    not on slots: nodes of a tree sit in slots beyond their depth.
    """
    n = len(positions)
    mask = torch.zeros(n, base - start + n)
    mask[:, base - start :] = inside
    if window is not None:
        keys = torch.cat([torch.arange(start, base), positions])
        mask.masked_fill_(positions.unsqueeze(1) - keys >= window, HIDDEN)
    return mask
