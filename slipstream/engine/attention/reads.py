"""Reads of a segment: the pool rows of its keys, and masks of candidate trees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from slipstream.engine.segment import Segment

HIDDEN = float("-inf")


def inside_mask(segment: Segment) -> torch.Tensor:
    """[n, n] fp32: a row sees itself and its ancestors; 0 visible, -inf hidden."""
    pending, n = len(segment.pending), segment.tokens
    if segment.is_chain:
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


class Read(NamedTuple):
    """The pool rows that one segment reads in the layers of one kind, and their mask."""

    start: int
    length: int
    rows: torch.Tensor | None
    """int64 [length] when the rows are not the run start .. start+length-1."""
    mask: torch.Tensor | None
    """[n * group, length] additive in the query's dtype; None when everything is visible to all queries."""
    position: int = 0
    """Position of the first key."""


def visible(keys: torch.Tensor, values: torch.Tensor, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, heads, length, dim] each: views of a contiguous run, else gathered copies."""
    if read.rows is None:
        return keys.narrow(2, read.start, read.length), values.narrow(2, read.start, read.length)
    return keys.index_select(2, read.rows), values.index_select(2, read.rows)
