"""The candidates of drafters and their acceptance: one candidate tree for each session, of ranks instead of tokens.

Rank 0 is the drafter's first guess at a place, rank 1 the next one. Which of them the target takes is drawn when a pass
decides the place, so a tree needs no text. It is one tree for both sides: the drafter's root lies behind the verifier's
by the commits that are still on their way (`lag`), and the verifier sees the guesses that have arrived.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from slipstream.engine.emulated.model import ALTERNATIVES
from slipstream.proposers.draft_tree import DEEPEST
from slipstream.proposers.drafting.session import PREPARED, UNSENT_SHARE
from verifier_svc.wait_policy.draft_threshold import LEVELS

NOWHERE = -1
"""Rank of a token that is none of the guesses."""
NEVER = math.inf


@dataclass(frozen=True)
class Acceptance:
    """Probabilities that the target takes a drafter's candidates, given that it took all before them."""

    by_depth: Sequence[float]
    """Probability of the first candidate at depth 1, 2 ...; the last one holds for all below it."""
    fanout: float = 0.0
    """Probability that the truth is among the further candidates, where the first one is wrong."""
    width: int = 4
    """Guesses at a place; 1 makes chains."""

    def shares(self, depth: int) -> tuple[float, ...]:
        """Probability of each rank at this depth, 1 below the last committed token."""
        return self._shares[min(depth, len(self._shares)) - 1]

    def rank(self, depth: int, draw: float) -> int:
        """The rank that the target takes at this depth, for a number drawn from [0, 1)."""
        place = bisect_right(self._sums[min(depth, len(self._sums)) - 1], draw)
        return place if place < self.width else NOWHERE

    @cached_property
    def _shares(self) -> list[tuple[float, ...]]:
        return [
            (first, *((1.0 - first) * self.fanout * a for a in ALTERNATIVES))[: self.width] for first in self.by_depth
        ]

    @cached_property
    def _sums(self) -> list[tuple[float, ...]]:
        return [tuple(accumulate(shares)) for shares in self._shares]


class SimulatedGuess:
    """A candidate, or the root."""

    __slots__ = ("arrives", "children", "depth", "expanded", "parent", "path")

    def __init__(self, parent: SimulatedGuess | None, depth: int, path: float) -> None:
        self.parent = parent
        self.depth = depth
        self.path = path
        """Probability of the path from the drafter's root."""
        self.expanded = False
        self.children: list[SimulatedGuess] = []
        """By rank."""
        self.arrives = NEVER
        """When the verifier has it; NEVER: not sent."""


class SimulatedTree:
    """The candidate tree of one session."""

    def __init__(self, acceptance: Acceptance, least: float = LEVELS[0]) -> None:
        self._acceptance = acceptance
        self.least = least
        """Path probability worth sending."""
        self._order = 0
        self.lag: list[int] = []
        """Ranks of committed tokens that the drafter has not received yet."""
        self._plant(SimulatedGuess(None, 0, 1.0))

    # The drafter's part.

    def demand(self, least: float) -> None:
        """Another path probability is worth sending from now on."""
        if least != self.least:
            self.least = least
            self._plant(self.root)

    def frontier(self, count: int, most: int) -> list[SimulatedGuess]:
        """The `count` likeliest places that were not guessed on yet; `most` nodes may be sent."""
        room = most - self.sent
        if room <= 0 or self.size >= UNSENT_SHARE * most:
            return []
        return self._best(self._open, min(count, room))

    def shelve(self, places: Sequence[SimulatedGuess]) -> None:
        """These are not guessed on now."""
        for place in places:
            self._push(self._open, place, self.least / PREPARED)

    def grow(self, place: SimulatedGuess) -> None:
        """Adds the guesses below a place, unless it died since the pass began."""
        if self._lives(place):
            shares = self._acceptance.shares(place.depth - self.root.depth + 1)
            place.children = [SimulatedGuess(place, place.depth + 1, place.path * share) for share in shares]
            for child in place.children:
                self._push(self._open, child, self.least / PREPARED)
                self._push(self._unsent, child, self.least)
            self.size += len(shares)

    def mark_sent(self, most: int, arrives: float) -> bool:
        """Sends the nodes that are likely enough, and the best next token in any case. Returns True if any."""
        worthy = self._best(self._unsent, most - self.sent)
        first = self.root.children[:1]
        if first and first[0].arrives == NEVER and first[0] not in worthy and self.sent + len(worthy) < most:
            worthy += first
        for node in worthy:
            node.arrives = arrives
        self.sent += len(worthy)
        return bool(worthy)

    def commit(self, count: int) -> None:
        """The drafter receives the next `count` committed tokens."""
        ranks, self.lag = self.lag[:count], self.lag[count:]
        old, new = self.root, _walk(self.root, ranks) or SimulatedGuess(None, 0, 1.0)
        if new.parent is not None:
            new.parent.children = [child for child in new.parent.children if child is not new]
        _drop(old)
        self._plant(new)

    # The verifier's part.

    def offer(self, now: float, limit: int) -> tuple[list[SimulatedGuess], list[float]]:
        """The best candidates that have arrived, best first, and their path probabilities."""
        root = _walk(self.root, self.lag)
        if root is None:
            return [], []
        chosen: list[SimulatedGuess] = []
        paths: list[float] = []
        heap: list[tuple[float, int, SimulatedGuess]] = []
        node, path, order = root, 1.0, 0
        while len(chosen) < limit:
            for child, share in zip(node.children, self._acceptance.shares(node.depth - root.depth + 1), strict=False):
                if child.arrives <= now:
                    order += 1
                    heapq.heappush(heap, (-path * share, order, child))
            if not heap:
                break
            cost, _, node = heapq.heappop(heap)
            path = -cost
            chosen.append(node)
            paths.append(path)
        return chosen, paths

    def decide(self, chosen: Sequence[SimulatedGuess], draws: Sequence[float]) -> tuple[list[int], bool]:
        """(ranks of the tokens that a pass over these candidates commits, at most one for each draw; whether one of the
        candidates was refused at the end of the accepted path)"""
        taken, node, ranks = set(map(id, chosen)), _walk(self.root, self.lag), list[int]()
        refused = False
        for draw in draws:
            rank = self._acceptance.rank(len(ranks) + 1, draw)
            ranks.append(rank)
            children = node.children if node is not None else []
            node = children[rank] if rank != NOWHERE and children else None
            if node is None or id(node) not in taken:
                refused = any(id(child) in taken for child in children)
                break
        self.lag += ranks
        return ranks, refused

    def holds(self, count: int, now: float) -> bool:
        """True if the verifier has so many candidates."""
        root = _walk(self.root, self.lag)
        stack = [] if root is None else [*root.children]
        while stack and count > 0:
            node = stack.pop()
            if node.arrives <= now:
                count -= 1
                stack += node.children
        return count <= 0

    def _plant(self, root: SimulatedGuess) -> None:
        """The drafter's root is another one; what does not hang below it is dead."""
        root.parent = None
        self.root = root
        whole, root.path = root.path, 1.0
        self.size = self.sent = 0
        self._open: list[tuple[float, int, SimulatedGuess]] = []
        self._unsent: list[tuple[float, int, SimulatedGuess]] = []
        if not root.expanded:
            self._push(self._open, root, 0.0)
        stack = [*root.children]
        while stack:
            node = stack.pop()
            self.size += 1
            node.path /= whole
            if not node.expanded:
                self._push(self._open, node, self.least / PREPARED)
            if node.arrives == NEVER:
                self._push(self._unsent, node, self.least)
            else:
                self.sent += 1
            stack += node.children

    def _push(self, heap: list[tuple[float, int, SimulatedGuess]], node: SimulatedGuess, least: float) -> None:
        """Pushes a node that is likely enough; the others are examined again when the root has moved."""
        if node.path >= least:
            self._order += 1
            heapq.heappush(heap, (-node.path, self._order, node))

    def _best(self, heap: list[tuple[float, int, SimulatedGuess]], count: int) -> list[SimulatedGuess]:
        """Takes the likeliest from the heap, down to DEEPEST as seen from the root."""
        deepest = self.root.depth + DEEPEST
        best: list[SimulatedGuess] = []
        while heap and len(best) < count:
            _, _, node = heapq.heappop(heap)
            if node.depth < deepest and not (heap is self._unsent and node.arrives < NEVER):
                best.append(node)
        return best

    def _lives(self, node: SimulatedGuess) -> bool:
        above: SimulatedGuess | None = node
        while above is not None and above is not self.root:
            above = above.parent
        return above is not None


def _drop(node: SimulatedGuess) -> None:
    """Takes a dead tree apart: rings of parents and children would wait for the garbage collector."""
    stack = [node]
    while stack:
        dead = stack.pop()
        stack += dead.children
        dead.children, dead.parent = [], None


def _walk(node: SimulatedGuess | None, ranks: Sequence[int]) -> SimulatedGuess | None:
    """The guess at the end of a path, if it was made."""
    for rank in ranks:
        if node is None or rank == NOWHERE or not node.children:
            return None
        node = node.children[rank]
    return node
