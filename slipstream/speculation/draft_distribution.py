"""The sparse distribution q that a draft token was drawn from, as the integer weights of the draw itself.

The drafter truncates to its top tokens, quantises, and draws from *that*; so both sides compute the same q from
integers and no float is compared across machines. Drawing from the full q and sending its head instead would bias the
ratio rule `rejection`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slipstream.errors import InvalidArgument

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


def check(distribution: DraftDistribution, vocabulary_size: int) -> None:
    """Raises InvalidArgument for a distribution that no correct drafter sends."""
    if not 1 <= len(distribution.token_ids) <= MAX_TOKENS or len(distribution.token_ids) != len(distribution.weights):
        raise InvalidArgument(f"a distribution needs 1 to {MAX_TOKENS} tokens, each with one weight.")
    if len(set(distribution.token_ids)) != len(distribution.token_ids):
        raise InvalidArgument("a distribution names a token twice; send each token once.")
    if not all(0 <= token < vocabulary_size for token in distribution.token_ids):
        raise InvalidArgument("a distribution names a token outside the vocabulary.")
    if not all(1 <= weight <= MAX_WEIGHT for weight in distribution.weights):
        raise InvalidArgument(f"weights must lie in 1..{MAX_WEIGHT}.")
