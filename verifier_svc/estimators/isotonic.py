"""The non-decreasing sequence nearest to a noisy one."""

from __future__ import annotations

from collections.abc import Sequence


def non_decreasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """argmin over x[0] <= x[1] <= ... of sum of weights * (x - values)^2, by pooling adjacent violators, in O(n).

    A running maximum would be non-decreasing too, but there one value measured too high lifts all values after it.
    Here it is averaged with those that contradict it, by how much each is trusted. Weights are positive.
    Ayer et al., "An empirical distribution function for sampling with incomplete information", 1955.
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while pools and pools[-1][0] >= value:
            before, heavy, count = pools.pop()
            # Written so that equal values stay what they are, to the last bit.
            value = before + (value - before) * (weight / (weight + heavy))
            weight, size = weight + heavy, size + count
        pools.append((value, weight, size))
    return [value for value, _, size in pools for _ in range(size)]
