"""Tests of sampled output that a wrong acceptance rule cannot pass: does it lean towards what was drafted?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy

FloatArray = npt.NDArray[np.float64]
MOST_DEVIATIONS = 5.0
"""Output of a system that is right is beyond in fewer than one of 10^6 runs."""


class Leaning:
    """How far draws lean from the target's p towards the drafter's q: the sum of q / (p + q) over them, less what p
    itself makes of it, in standard deviations. Draws from p have 0, whatever came before each of them; a rule that
    accepts too much is far above, because that score tells p from q best."""

    def __init__(self) -> None:
        self._excess = self._variance = 0.0

    def add(self, p: FloatArray, q: FloatArray, drawn: list[int]) -> None:
        """p and q [draws, values], and the value that each draw had."""
        score = q / np.maximum(p + q, 1e-300)
        mean = (p * score).sum(-1)
        self._excess += float((score[np.arange(len(drawn)), drawn] - mean).sum())
        self._variance += float((p * score**2).sum() - (mean**2).sum())

    @property
    def deviations(self) -> float:
        return self._excess / self._variance**0.5


def ranks(p: FloatArray, output: list[int], chance: np.random.Generator) -> FloatArray:
    """Where each token fell among those at its place, the likeliest first: uniform on [0, 1) iff it was drawn from p
    (randomised probability integral transform, Smith 1985)."""
    own = p[np.arange(len(output)), output]
    above = np.where(p > own[:, None], p, 0.0).sum(-1)
    equal = np.where(p == own[:, None], p, 0.0).sum(-1)
    return above + chance.random(len(output)) * equal


def uniformity(where: FloatArray, bins: int = 20) -> float:
    """The p-value of a chi-square test that ranks are uniform."""
    return float(
        scipy.stats.chisquare(np.bincount((where * bins).astype(int).clip(max=bins - 1), minlength=bins)).pvalue
    )
