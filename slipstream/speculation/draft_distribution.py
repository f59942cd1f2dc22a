"""The sparse distribution q that a draft token was drawn from, as the integer weights of the draw itself.

The drafter truncates to its top tokens, quantises, and draws from *that*; so both sides compute the same q from
integers and no float is compared across machines. Drawing from the full q and sending its head instead would bias the
ratio rule `rejection`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.errors import PROTOCOL, InvalidArgument

MAX_WEIGHT = 65535
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """q(token_ids[i]) = weights[i] / sum(weights); every other token has q = 0."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]
    """uint16, at least 1 each."""

    def without(self, tokens: Collection[int]) -> DraftDistribution:
        """The distribution of a draw, given that it is none of these tokens. It may be empty."""
        kept = [pair for pair in zip(self.token_ids, self.weights, strict=True) if pair[0] not in tokens]
        return DraftDistribution(tuple(token for token, _ in kept), tuple(weight for _, weight in kept))


def checked(token_ids: Sequence[int], weights: Sequence[int], vocabulary_size: int) -> DraftDistribution:
    """The distribution of these tokens and weights. Raises InvalidArgument for one that no correct drafter sends."""
    if not 1 <= len(token_ids) <= MAX_TOKENS or len(token_ids) != len(weights):
        raise InvalidArgument(f"a distribution needs 1 to {MAX_TOKENS} tokens, each with one weight.", reason=PROTOCOL)
    ids, shares = np.array(token_ids, dtype=np.int64), np.array(weights, dtype=np.int64)
    ordered = np.sort(ids)
    if (ordered[1:] == ordered[:-1]).any():
        raise InvalidArgument("a distribution names a token twice; send each token once.", reason=PROTOCOL)
    if ordered[0] < 0 or ordered[-1] >= vocabulary_size:
        raise InvalidArgument("a distribution names a token outside the vocabulary.", reason=PROTOCOL)
    if shares.min() < 1 or shares.max() > MAX_WEIGHT:
        raise InvalidArgument(f"weights must lie in 1..{MAX_WEIGHT}.", reason=PROTOCOL)
    return DraftDistribution(tuple(ids.tolist()), tuple(shares.tolist()))
