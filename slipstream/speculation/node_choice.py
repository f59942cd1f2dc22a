"""Which nodes of a candidate tree a step takes: pure functions of the tree below its root."""

from __future__ import annotations

import heapq

from slipstream.speculation.node import Node
from slipstream.speculation.selection import ROOT, Selection


def likeliest(root: Node, budget: int) -> Selection:
    """The `budget` nodes of highest path probability; ties go to the earlier node. Connected, best first."""
    picked: list[Node] = []
    parents: list[int] = []
    scores: list[float] = []
    frontier: list[tuple[float, int, Node, int]] = []
    node, score, index = root, 0.0, ROOT
    while len(picked) < budget:
        for child in node.children.values():
            heapq.heappush(frontier, (-(score + child.log_prob), child.order, child, index))
        if not frontier:
            break
        cost, _, node, parent = heapq.heappop(frontier)
        score, index = -cost, len(picked)
        picked.append(node)
        parents.append(parent)
        scores.append(score)
    return _pack(root, picked, parents, scores)


def likeliest_chain(root: Node, length: int) -> Selection:
    """The likeliest child of each node, from the root down: for engines that verify chains only."""
    picked: list[Node] = []
    node = root
    while len(picked) < length and node.children:
        node = max(node.children.values(), key=lambda child: child.log_prob)
        picked.append(node)
    return _connect(root, picked)


def first_children(root: Node, length: int) -> Selection:
    """A chain of first-created children only: a choice that does not look at tokens, as the ratio rules need it."""
    picked: list[Node] = []
    node = root
    while len(picked) < length and node.children:
        node = next(iter(node.children.values()))
        picked.append(node)
    return _connect(root, picked)


def first_created(root: Node, budget: int) -> Selection:
    """The `budget` nodes that were created first: of one drafter's tree, siblings in the order of drawing, and a
    connected piece, cut by count alone. So whether a node is in it depends on what was created before it, never on
    its own token or on what is below or after it.
    """
    return _connect(root, sorted(root.descendants(), key=lambda node: node.order)[:budget])


def _connect(root: Node, picked: list[Node]) -> Selection:
    """These nodes, parents before children."""
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
