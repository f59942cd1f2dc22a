"""Keyed noise as what it stands for: to each key belongs one uniform number, drawn once, whoever looks at it and
however often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np

from slipstream.speculation import noise
from slipstream.speculation.noise import Purpose
from tests.support.enumeration import Outcomes, Path
from verifier_svc.acceptance.rejection import KeyedRandomness
from verifier_svc.acceptance.result import FloatArray


class Noise(Outcomes):
    """One uniform number for each key, with the interval that its uses have narrowed down so far."""

    def __init__(self, script: Path) -> None:
        super().__init__(script)
        self._between: dict[tuple[int, int], tuple[float, float]] = {}

    def choose(self, key: tuple[int, int], shares: Sequence[float]) -> int:
        """Index of the interval, of lengths `shares` from 0 on, that the key's number lies in."""
        low, high = self._between.get(key, (0.0, 1.0))
        ends = [min(1.0, math.fsum(shares[: index + 1])) for index in range(len(shares))]
        ends[-1] = 1.0
        pieces = [(max(low, start), min(high, end)) for start, end in zip([0.0, *ends[:-1]], ends, strict=True)]
        chosen = self.branch([max(0.0, end - start) / (high - low) for start, end in pieces])
        self._between[key] = pieces[chosen]
        return chosen


@dataclass(frozen=True, slots=True)
class Coin:
    """A uniform number that only comparisons ask for."""

    noise: Noise
    key: tuple[int, int]

    def __lt__(self, probability: float) -> bool:
        return self.noise.choose(self.key, [probability, 1.0 - probability]) == 0


@contextmanager
def kept(chances: Noise) -> Iterator[None]:
    """The rules' own chances, on these numbers."""

    def draw(chance: KeyedRandomness, depth: int, weights: FloatArray, purpose: Purpose) -> int:
        possible = np.flatnonzero(weights > 0.0)
        shares = weights[possible] / weights[possible].sum()
        key = noise.key(chance._seed, chance._position + depth, purpose)
        return int(possible[chances.choose((key, 0), shares.tolist())])

    def coin(key: int, index: int = 0) -> Coin:
        return Coin(chances, (key, index))

    with mock.patch.object(noise, "scalar_uniform", coin), mock.patch.object(KeyedRandomness, "draw", draw):
        yield
