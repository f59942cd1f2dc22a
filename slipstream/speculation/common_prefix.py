"""What two texts begin with alike."""

from __future__ import annotations


def common_prefix(some: list[int], others: list[int]) -> int:
    """How many tokens they share at the beginning. By halves: slices are compared many times faster than elements."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if some[low:middle] == others[low:middle] else (low, middle - 1)
    return low
