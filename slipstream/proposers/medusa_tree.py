"""The sparse tree of Medusa's candidates: the paths that maximise the expected accepted length.

Every parent of one depth has the same ranked children, so a path is a tuple of ranks, one for each depth, and its
probability the product of theirs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Path = tuple[int, ...]


def grow(probability: Sequence[Sequence[float]], size: int) -> list[tuple[Path, float]]:
    """The `size` likeliest paths with their probabilities, best first and parents before children.

    `probability[depth][rank]` is that of one rank given the parent, not rising with the rank. Best first is
    optimal: a path is never likelier than its parent or its better sibling (Chen et al. 2024, arXiv 2402.12374, for
    independent depths).
    """
    chosen: list[tuple[Path, float]] = []
    frontier: list[tuple[float, Path]] = [(-probability[0][0], (0,))] if size > 0 and probability else []
    while frontier and len(chosen) < size:
        negative, path = heapq.heappop(frontier)
        if not negative:
            break
        chosen.append((path, -negative))
        depth, rank = len(path) - 1, path[-1]
        ranks = probability[depth]
        if rank + 1 < len(ranks):
            heapq.heappush(frontier, (negative / ranks[rank] * ranks[rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(probability):
            heapq.heappush(frontier, (negative * probability[depth + 1][0], (*path, 0)))
    return chosen
