"""A drafter's own candidate tree: what it guessed beyond the committed prefix, and where it is worth guessing on.

The mirror of `slipstream.candidates`, seen from the sender: nodes are numbered within a generation and keep their
numbers while commits move the root along them; a commit that leaves the tree starts the next generation, from nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = 0
"""Number of the generation's root."""


@dataclass(slots=True, eq=False)
class Node:
    """A guessed token. The root is a node too: it stands for the last committed token."""

    number: int
    token: int
    parent: Node | None
    depth: int
    """Below the generation's root."""
    log_prob: float = 0.0
    path_log_prob: float = 0.0
    """Sum of log_probs below the generation's root; what is below the present root differs by a constant."""
    expanded: bool = False
    """Whether its children were guessed already."""
    children: dict[int, Node] = field(default_factory=dict)


class DraftTree:
    """Not thread-safe; owned by the event loop."""

    def __init__(self, base_length: int) -> None:
        self.generation = 1
        self.base_length = self._committed = base_length
        self._root = Node(ROOT, -1, None, 0)
        self._last_number = ROOT
        self._count = 0

    @property
    def node_count(self) -> int:
        """Live nodes below the root."""
        return self._count

    @property
    def root(self) -> Node:
        return self._root

    def lives(self, node: Node) -> bool:
        """Whether the node is the root or hangs below it."""
        above: Node | None = node
        while above is not None and above is not self._root:
            above = above.parent
        return above is not None

    def add(self, parent: Node, token: int, log_prob: float) -> Node | None:
        """One more guess; None when the parent is dead, or has that child already."""
        if token in parent.children or not self.lives(parent):
            return None
        self._last_number += 1
        node = Node(self._last_number, token, parent, parent.depth + 1, log_prob, parent.path_log_prob + log_prob)
        parent.children[token] = node
        self._count += 1
        return node

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Moves the root along committed tokens. False when they left the tree: a new generation begins after them."""
        node: Node | None = self._root
        for token in token_ids:
            node = node.children.get(token) if node is not None else None
        self._committed += len(token_ids)
        if node is None:
            self.restart(self._committed)
            return False
        self._root = node
        node.parent = None  # what hangs elsewhere is garbage now
        self._count = sum(1 for _ in self.nodes())
        return True

    def restart(self, length: int) -> None:
        """A new generation, from nothing, after a committed prefix of `length` tokens."""
        self.generation += 1
        self.base_length = self._committed = length
        self._root = Node(ROOT, -1, None, 0)
        self._last_number = ROOT
        self._count = 0

    def nodes(self) -> Iterator[Node]:
        """Live nodes below the root, every parent before its children, older siblings first."""
        stack = [*reversed(self._root.children.values())]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def frontier(self, count: int, least_log_prob: float, max_depth: int) -> list[Node]:
        """The `count` likeliest nodes, root included, whose children were not guessed yet, best first.

        Path log-probabilities count from the present root; nodes below `least_log_prob` or at `max_depth` are left.
        """
        top, deepest = self._root.path_log_prob, self._root.depth + max_depth
        open_nodes = [
            node
            for node in (self._root, *self.nodes())
            if not node.expanded and node.path_log_prob - top >= least_log_prob and node.depth < deepest
        ]
        return heapq.nsmallest(count, open_nodes, key=lambda node: (-node.path_log_prob, node.number))
