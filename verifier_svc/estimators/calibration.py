"""Calibration of drafters' confidences: reliability curves, learned from what was accepted.

A drafter says of a node "accepted with probability c, given that its parent is". Per (drafter, workload label, depth) a
curve maps c to the measured acceptance (a reliability diagram, made monotone: Zadrozny and Elkan, KDD 2002). Claims are
sorted into bins, finer near 1 where confidences crowd and path products are sensitive. A bin's point is

    x = (sum of claims + STRENGTH * centre) / (count + STRENGTH)
    y = (accepted      + STRENGTH * prior(centre)) / (count + STRENGTH)

(the mean of a Beta posterior), the y are made non-decreasing, and between the points the curve is linear. The prior of
a label's curve is its drafter's at that depth; the prior of that, the drafter's at all depths; of that, the claim.

**Only a node whose parent was accepted gives evidence.** Under a rejected parent the target never showed what it would
have taken: counting such a node as rejected would charge the parent's failure to the child, once more per level, and
path products would then multiply it twice. For such nodes c is simply not observed. The choice of nodes by the budget
does no such harm: it looks at c (and depth), which is what the curve is conditioned on.

**Evidence ages**, by count (the last WINDOW of a bin, about) and by time. Without the second a drafter once judged bad
would get no candidates verified, hence give no evidence, hence stay judged bad for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from slipstream.speculation.selection import ROOT, Selection

EDGES = (0.1, 0.25, 0.45, 0.65, 0.8, 0.92, 0.98)
"""Between the eight bins of confidence."""
CENTRES = (0.05, 0.175, 0.35, 0.55, 0.725, 0.86, 0.95, 0.99)
DEPTHS = (1, 2, 4, 8)
"""The last depth of each bucket; one more bucket takes all that is deeper."""
ANY_DEPTH = len(DEPTHS) + 1
STRENGTH = 8.0
"""Observations that the prior is worth."""
WINDOW = 256.0
"""Observations after which one counts 1/e."""
HALF_LIFE_S = 60.0
REFRESH_S = 1.0
"""A curve without new evidence of its own is drawn again after this: it aged, and its prior may have learned."""
MOST_TABLES = 256
"""(drafter, label) pairs and drafters that are remembered; the one observed longest ago goes first."""

_KEEP = 1.0 - 1.0 / WINDOW


class _Bin:
    """Aged sums."""

    __slots__ = ("accepted", "at", "claimed", "count")

    def __init__(self) -> None:
        self.count = self.claimed = self.accepted = self.at = 0.0

    def age(self, now: float) -> float:
        """The share of its evidence that time has left."""
        return math.exp2((self.at - now) / HALF_LIFE_S)

    def add(self, now: float, confidence: float, accepted: bool) -> None:
        keep = self.age(now) * _KEEP
        self.count = self.count * keep + 1.0
        self.claimed = self.claimed * keep + confidence
        self.accepted = self.accepted * keep + accepted
        self.at = now


class _Curve:
    """Through the origin and its points (ascending), linear between them, constant beyond the last."""

    __slots__ = ("_slopes", "_xs", "_ys", "drawn_at")

    def __init__(self, xs: Sequence[float], ys: Sequence[float], drawn_at: float) -> None:
        self._xs = [0.0, *xs]
        self._ys = [0.0, *ys, ys[-1]]
        widths = [high - low for low, high in pairwise(self._xs)]
        self._slopes = [(high - low) / width for width, (low, high) in zip(widths, pairwise(self._ys), strict=False)]
        self._slopes.append(0.0)
        self.drawn_at = drawn_at

    def __call__(self, confidence: float) -> float:
        """The measured acceptance probability at a confidence >= 0, interpolated between bins."""
        left = bisect_right(self._xs, confidence) - 1
        y = self._ys[left] + self._slopes[left] * (confidence - self._xs[left])
        # Rounding must not lift the end of one piece above the start of the next.
        return min(y, self._ys[left + 1])


CLAIM = _Curve(CENTRES, CENTRES, 0.0)
"""Believes the drafter, up to 0.99."""


class _Table:
    """The evidence on one drafter, or on one drafter and label, and the curves drawn from it."""

    def __init__(self) -> None:
        self.bins = [[_Bin() for _ in CENTRES] for _ in range(ANY_DEPTH + 1)]
        self.curves: list[_Curve | None] = [None] * (ANY_DEPTH + 1)

    def add(self, now: float, bucket: int, confidence: float, accepted: bool) -> None:
        self.bins[bucket][bisect_right(EDGES, confidence)].add(now, confidence, accepted)
        self.curves[bucket] = None

    def curve(self, now: float, bucket: int, prior: _Curve) -> _Curve:
        curve = self.curves[bucket]
        if curve is None or now - curve.drawn_at > REFRESH_S:
            curve = self.curves[bucket] = _draw(self.bins[bucket], prior, now)
        return curve


class Calibration:
    """Turns confidence into probability. Owned by one thread; `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tables: OrderedDict[tuple[str, str | None], _Table] = OrderedDict()
        self._asked: dict[tuple[str, str, int], _Curve] = {}
        """Curves that judge all sessions of a step; the next ones mostly ask for the same."""
        self._ready: dict[tuple[str, str, int], _Curve] = {}
        self._drawn_at = -math.inf
        """When these were; never again after an observation."""

    def __len__(self) -> int:
        return len(self._tables)

    def observe(self, drafter: str, label: str, depth: int, confidence: float, accepted: bool) -> None:
        """Records the outcome of one node, `depth` tokens behind the last committed one. Only for a node whose parent
        was accepted (or is the root)."""
        now, bucket = self._clock(), _bucket(depth)
        confidence = _clamp(confidence)
        self._drawn_at = -math.inf
        table = self._touch((drafter, None))
        table.add(now, bucket, confidence, accepted)
        table.add(now, ANY_DEPTH, confidence, accepted)
        self._touch((drafter, label)).add(now, bucket, confidence, accepted)

    def learn(self, drafters: Sequence[str], label: str, chosen: Selection, path: Iterable[int]) -> None:
        """`observe` for all nodes of a verified selection that give evidence, given the accepted path in it and the
        drafter of each node."""
        accepted = {ROOT, *path}
        for node, parent in enumerate(chosen.parents):
            if parent in accepted:
                confidence = math.exp(chosen.log_probs[node])
                self.observe(drafters[node], label, chosen.depths[node], confidence, node in accepted)

    def path_probabilities(self, drafters: Sequence[str], label: str, chosen: Selection) -> list[float]:
        """The probability of each node to be on the accepted path: the product of corrected confidences."""
        now = self._clock()
        if now - self._drawn_at > REFRESH_S:
            self._asked, self._ready, self._drawn_at = {}, {}, now
        curves = self._asked
        paths: list[float] = []
        for drafter, parent, depth, log_prob in zip(
            drafters, chosen.parents, chosen.depths, chosen.log_probs, strict=True
        ):
            key = drafter, label, _BUCKETS[depth] if depth < len(_BUCKETS) else ANY_DEPTH - 1
            curve = curves.get(key)
            if curve is None:
                curve = curves[key] = self._ready.get(key) or self._curve(*key, now)
            share = curve(math.exp(log_prob))
            paths.append(share if parent == ROOT else paths[parent] * share)
        return paths

    def draw_curves(self) -> None:
        """Draws anew what was asked for since the last time, so that whoever asks next need not wait."""
        now = self._clock()
        self._ready = {key: self._curve(*key, now) for key in self._asked}
        self._asked, self._drawn_at = {}, now

    def _curve(self, drafter: str, label: str, bucket: int, now: float) -> _Curve:
        curve = CLAIM
        general = self._tables.get((drafter, None))
        if general is not None:
            curve = general.curve(now, bucket, general.curve(now, ANY_DEPTH, CLAIM))
        special = self._tables.get((drafter, label))
        return curve if special is None else special.curve(now, bucket, curve)

    def _touch(self, key: tuple[str, str | None]) -> _Table:
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _Table()
            if len(self._tables) > MOST_TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        return table


def _bucket(depth: int) -> int:
    return bisect_left(DEPTHS, depth)


_BUCKETS = tuple(map(_bucket, range(DEPTHS[-1] + 1)))


def _clamp(confidence: float) -> float:
    """Into [0, 1]; what is no number is 0."""
    return min(max(0.0, confidence), 1.0)


def _draw(bins: list[_Bin], prior: _Curve, now: float) -> _Curve:
    xs, ys, weights = [], [], []
    for evidence, centre in zip(bins, CENTRES, strict=True):
        age = evidence.age(now)
        weight = evidence.count * age + STRENGTH
        xs.append((evidence.claimed * age + STRENGTH * centre) / weight)
        ys.append((evidence.accepted * age + STRENGTH * prior(centre)) / weight)
        weights.append(weight)
    return _Curve(xs, non_decreasing(ys, weights), now)


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
