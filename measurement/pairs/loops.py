"""Texts that loop: small models fall into loops where they are greedy, and every drafter guesses a loop."""

from __future__ import annotations

from collections.abc import Sequence

DISTINCT = 0.6
"""Least share of different 4-grams in a greedy text: any drafter predicts a loop, which flatters all figures."""


def distinct_share(token_ids: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams; 1.0 for text too short to repeat."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0
