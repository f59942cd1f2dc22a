"""Cost of a step on this machine: measured at start, refined by every step since.

Seconds are kept per bucket of tokens in the step and of sessions that bring them (powers of two: attention works per
session, the linear layers per token). What was never measured is filled in, from the farthest knowledge to the nearest:

    t0(n) = PRIOR_S * (1 + n / FREE_TOKENS)                        the prior: a large fixed cost, then a slope
    t(n)  = t'(n) * r(n),  r(b) = measured(b) / t'(b),             for each row of sessions, the nearest last;

r is linear between the measured buckets and constant beyond them. So where a row has few measurements they give the
level, and the *shape* comes from the rows around it: the budget compares t at several n, so ratios are what it needs.
Beyond all that was measured t goes on at least in a straight line through its last doubling: a slow machine measures
small sizes alone, and at these its passes take time in proportion to their tokens already. In the end t is made
non-decreasing in tokens (`isotonic`): that more tokens were faster is noise, and a budget that chases it would fill
steps up with nodes that are worth nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from verifier_svc.estimators.calibration import non_decreasing

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Tokens. Linear between them."""
LAST = BUCKETS[-1]
ROWS = 11
"""Bins of session counts: 1, 2, 4 .. 1024 and more."""
PRIOR_S = 0.02
FREE_TOKENS = 64
"""So many tokens double the time of an empty step, before anything was measured."""
LEAST_WEIGHT = 0.1
"""The weight of a new measurement; the first ones count more: 1 / (their number + 1)."""
FASTEST, SLOWEST = 1 / 4, 1.25
"""One measurement counts as no less and no more than these multiples of what was expected."""
FILLED = 0.1
"""Weight of a filled-in bucket where it contradicts a measured one, which weighs 1 or more."""

_BORDERS = [math.sqrt(low * high) for low, high in pairwise(BUCKETS)]


class _Cell:
    __slots__ = ("count", "seconds")

    def __init__(self, seconds: float, count: int) -> None:
        self.seconds = seconds
        self.count = count


_Row = list[_Cell | None]


class CostCurve:
    """Seconds of one step as a function of its tokens and sessions. Owned by one thread."""

    def __init__(self, free_candidates: bool = False) -> None:
        """`free_candidates`: a step takes as long as without any, so that every candidate pays."""
        self._free_candidates = free_candidates
        self._rows: dict[int, _Row] = {}
        self._shapes: dict[int, list[float]] = {}
        """Seconds of BUCKETS tokens by row, as the other rows know them (`_shape`)."""
        self._grids: dict[int, list[float]] = {}
        """Seconds of BUCKETS tokens by row."""

    def seconds(self, tokens: int, sessions: int) -> float:
        """Positive, and non-decreasing in tokens. 1 µs, or 20 µs when measurements came in since the last call."""
        return _at(self._grid(_row(sessions)), sessions if self._free_candidates else tokens)

    def over(self, sessions: int) -> Callable[[range], list[float]]:
        """`seconds` of hundreds of sizes at once, ascending by one, as the budget asks for them in every step."""
        grid = self._grid(_row(sessions))
        if self._free_candidates:
            return lambda sizes: [_at(grid, sessions)] * len(sizes)
        return lambda sizes: _between(grid, sizes)

    def rows(self, sessions: Sequence[int]) -> list[list[float]]:
        """Seconds of BUCKETS tokens, for each number of sessions; candidates are never free here."""
        return [list(self._grid(_row(each))) for each in sessions]

    def observe(self, tokens: int, sessions: int, seconds: float) -> None:
        """One step's duration, by an EWMA of its logarithm with clipped steps (Huber).

        A step that was preempted on a shared core takes up to 50 times as long; it moves the estimate by 2 %, and a
        machine that really became twice as slow is believed after some 30 steps. The clip is wider downwards, because
        no accident makes a step faster than it can be.
        """
        if not 0.0 < seconds < math.inf:
            return
        bucket = bisect_left(_BORDERS, tokens)
        grid = self._grid(_row(sessions))
        expected = grid[bucket]
        # What the bucket's own size would have taken, by the shape of the curve so far.
        sample = seconds * expected / _at(grid, tokens)
        cells = self._rows.get(_row(sessions))
        cell = None if cells is None else cells[bucket]
        if cell is None:
            # Nothing at all is known before the very first measurement, so there is nothing to clip it by.
            cell = _Cell(expected if self._rows else sample, 0)
        share = min(max(sample / cell.seconds, FASTEST), SLOWEST)
        weight = max(LEAST_WEIGHT, 1.0 / (cell.count + 1))
        self._store(_row(sessions), bucket, _Cell(cell.seconds * share**weight, cell.count + 1))

    def record(self, tokens: int, sessions: int, durations: Sequence[float]) -> None:
        """Repeated measurements of one size: the fastest replaces what was believed.

        Accidents only add time. And a size taken for too fast is soon tried and corrected, one taken for too slow
        never: where cores are shared, even the median of a few is too slow too often.
        """
        bucket = bisect_left(_BORDERS, tokens)
        grid = self._grid(_row(sessions))
        fastest = min(durations)
        if 0.0 < fastest < math.inf:
            sample = fastest * grid[bucket] / _at(grid, tokens)
            self._store(_row(sessions), bucket, _Cell(sample, len(durations)))

    def _store(self, row: int, bucket: int, cell: _Cell) -> None:
        self._rows.setdefault(row, [None] * len(BUCKETS))[bucket] = cell
        self._grids.clear()
        self._shapes = {each: shape for each, shape in self._shapes.items() if each == row}

    def _grid(self, row: int) -> list[float]:
        """Seconds of BUCKETS tokens: what the others know, and this row's own measurements last."""
        grid = self._grids.get(row)
        if grid is None:
            own = self._rows.get(row)
            grid = _overlay(self._shape(row), own) if own else list(self._shape(row))
            _go_on_in_line(grid, max((_last(cells) for cells in self._rows.values()), default=0))
            weights = [FILLED if cell is None else float(cell.count) for cell in own or [None] * len(BUCKETS)]
            grid = self._grids[row] = non_decreasing(grid, weights)
        return grid

    def _shape(self, row: int) -> list[float]:
        """The prior, under every other measured row, the farthest first. Most steps are of one row, which alone changes
        then."""
        shape = self._shapes.get(row)
        if shape is None:
            shape = [PRIOR_S * (1.0 + size / FREE_TOKENS) for size in BUCKETS]
            for other in sorted(self._rows.keys() - {row}, key=lambda other: (-abs(other - row), other)):
                shape = _overlay(shape, self._rows[other])
            self._shapes[row] = shape
        return shape


def _row(sessions: int) -> int:
    return min(round(math.log2(max(sessions, 1))), ROWS - 1)


def _overlay(grid: list[float], cells: _Row) -> list[float]:
    """The grid bent so that it passes through the measured cells, of which there is at least one."""
    known = [(bucket, cell.seconds / grid[bucket]) for bucket, cell in enumerate(cells) if cell is not None]
    ratios = [known[0][1]] * known[0][0]
    for (left, low), (right, high) in pairwise(known):
        ratios += [low + (high - low) * step / (right - left) for step in range(right - left)]
    ratios += [known[-1][1]] * (len(grid) - known[-1][0])
    return [value * ratio for value, ratio in zip(grid, ratios, strict=True)]


def _last(cells: _Row) -> int:
    """The last bucket that was measured."""
    return max(bucket for bucket, cell in enumerate(cells) if cell is not None)


def _go_on_in_line(grid: list[float], last: int) -> None:
    """Raises what lies beyond the last measured bucket to the line through it and the one of half its size."""
    size = BUCKETS[last]
    half = bisect_left(BUCKETS, size // 2)
    slope = (grid[last] - grid[half]) / (size - BUCKETS[half]) if half < last else 0.0
    for bucket in range(last + 1, len(BUCKETS)):
        grid[bucket] = max(grid[bucket], grid[last] + slope * (BUCKETS[bucket] - size))


def _at(grid: list[float], tokens: int) -> float:
    if tokens >= LAST:  # so many tokens keep any machine busy: the time is proportional
        return grid[-1] * (tokens / LAST)
    if tokens <= BUCKETS[0]:
        return grid[0]
    bucket = bisect_right(BUCKETS, tokens)
    size, low = BUCKETS[bucket - 1], grid[bucket - 1]
    return low + (grid[bucket] - low) * ((tokens - size) / (BUCKETS[bucket] - size))


def _between(grid: list[float], sizes: range) -> list[float]:
    """`_at` of these sizes, ascending by one."""
    found = [_at(grid, tokens) for tokens in range(sizes.start, min(sizes.stop, BUCKETS[0]))]
    for (size, low), (next_size, high) in pairwise(zip(BUCKETS, grid, strict=True)):
        width = next_size - size
        here = range(max(size, sizes.start), min(next_size, sizes.stop))
        found += [low + (high - low) * ((tokens - size) / width) for tokens in here]
    return found + [_at(grid, tokens) for tokens in range(max(sizes.start, LAST), sizes.stop)]
