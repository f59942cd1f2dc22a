"""Selection of one verifier step from a session's candidate tree: a connected piece of it, packed into arrays.

One of the four functions at the end of this file picks nodes up to the session's draft limit, and the planner's budget
cuts them to the first few. The engine computes these in one pass, and the acceptance rule walks them from the root.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.node import Node

ROOT = -1
"""The index that stands for the last committed token."""


@dataclass(frozen=True)
class Selection:
    """Nodes in topological order (a parent stands before its children), indexed from 0."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of each node's parent in this selection, or ROOT."""
    depths: tuple[int, ...] = ()
    """1 for a child of the root."""
    log_probs: tuple[float, ...] = ()
    """Drafter's log-probability of each node given its parent."""
    path_log_probs: tuple[float, ...] = ()
    """Sum of log_probs from the root; never rises along what `select_likeliest` returns."""
    distributions: tuple[DraftDistribution | None, ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()
    """For each node, the drafters that sent it, by `Frame.source`."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def child(self, index: int, token: int) -> int | None:
        """The node with this token under node `index` (or ROOT); None where the selection has none."""
        return self._children.get((index, token))

    def first_child(self, index: int) -> int | None:
        """The earliest node of the selection under `index` (or ROOT)."""
        return self._first_children.get(index)

    def path(self, index: int) -> tuple[int, ...]:
        """The tokens from below the root down to node `index`; empty for ROOT."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(self.token_ids[index])
            index = self.parents[index]
        return tuple(reversed(tokens))

    def depth(self, index: int) -> int:
        return 0 if index == ROOT else self.depths[index]

    def head(self, size: int) -> Selection:
        """The first `size` nodes. They are connected, and of a best-first selection they are the best."""
        if size >= len(self):
            return self
        return Selection(
            self.token_ids[:size],
            self.parents[:size],
            self.depths[:size],
            self.log_probs[:size],
            self.path_log_probs[:size],
            self.distributions[:size],
            self.sources[:size],
        )

    def likeliest(self, paths: Sequence[float], size: int) -> tuple[Selection, list[float]]:
        """The `size` nodes of highest path probability by these numbers, one for each node, and their numbers; best
        first, ties to the earlier node. No node's number is above its parent's."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        picked: list[int] = []
        places = {ROOT: ROOT}
        frontier = [(-paths[node], node) for node in below.get(ROOT, ())]
        heapq.heapify(frontier)
        while frontier and len(picked) < size:
            node = heapq.heappop(frontier)[1]
            places[node] = len(picked)
            picked.append(node)
            for child in below.get(node, ()):
                heapq.heappush(frontier, (-paths[child], child))
        chosen = Selection(
            tuple([self.token_ids[node] for node in picked]),
            tuple([places[self.parents[node]] for node in picked]),
            tuple([self.depths[node] for node in picked]),
            tuple([self.log_probs[node] for node in picked]),
            tuple([self.path_log_probs[node] for node in picked]),
            tuple([self.distributions[node] for node in picked]),
            tuple([self.sources[node] for node in picked]),
        )
        return chosen, [paths[node] for node in picked]

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {edge: index for index, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}

    @cached_property
    def _first_children(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for index, parent in enumerate(self.parents):
            first.setdefault(parent, index)
        return first


def select_likeliest(root: Node, budget: int) -> Selection:
    """The `budget` nodes of highest path probability, best first; ties go to the earlier node."""
    picked: list[Node] = []
    parents: list[int] = []
    scores: list[float] = []
    frontier: list[tuple[float, int, Node, int]] = []
    node, score, index = root, 0.0, ROOT
    while len(picked) < budget:
        for child in node.children.values():
            if child.checked:
                heapq.heappush(frontier, (-(score + child.log_prob), child.order, child, index))
        if not frontier:
            break
        cost, _, node, parent = heapq.heappop(frontier)
        score, index = -cost, len(picked)
        picked.append(node)
        parents.append(parent)
        scores.append(score)
    return _pack(root, picked, parents, scores)


def select_likeliest_chain(root: Node, length: int) -> Selection:
    """The likeliest child of each node from the root down, for executors that verify chains only."""
    picked: list[Node] = []
    node = root
    while len(picked) < length and node.children:
        node = max(node.children.values(), key=lambda child: (child.checked, child.log_prob))
        if not node.checked:
            break
        picked.append(node)
    return _connect(root, picked)


def select_first_children(root: Node, length: int) -> Selection:
    """The first child of each node from the root down, for the ratio rule on executors that verify chains only."""
    picked: list[Node] = []
    node = root
    while len(picked) < length and node.children:
        node = next(iter(node.children.values()))
        picked.append(node)
    return _connect(root, picked)


def select_first_created(root: Node, budget: int) -> Selection:
    """The `budget` nodes that were created first, as the ratio rule needs them.

    In one drafter's tree these are a connected piece with siblings in the order of drawing, cut by count alone. So
    whether a node is selected depends on what was created before it, never on its own token or on later nodes.
    """
    return _connect(root, sorted(root.descendants(), key=lambda node: node.order)[:budget])


def _connect(root: Node, picked: list[Node]) -> Selection:
    """Packs nodes that are already sorted with parents before children."""
    index = {id(node): number for number, node in enumerate(picked)}
    parents = [index.get(id(node.parent), ROOT) for node in picked]
    scores: list[float] = []
    for node, parent in zip(picked, parents, strict=True):
        scores.append(node.log_prob + (scores[parent] if parent != ROOT else 0.0))
    return _pack(root, picked, parents, scores)


def _pack(root: Node, picked: list[Node], parents: list[int], scores: list[float]) -> Selection:
    return Selection(
        tuple([node.token for node in picked]),
        tuple(parents),
        tuple([node.length - root.length for node in picked]),
        tuple([node.log_prob for node in picked]),
        tuple(scores),
        tuple([node.distribution for node in picked]),
        tuple([node.sources for node in picked]),
    )
