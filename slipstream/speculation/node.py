"""One node of a candidate tree: a candidate token, or a committed one.

A node holds its parent and children, its log-probability and the drafters that sent it. `candidate_tree` links nodes,
`selection` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.speculation.draft_distribution import DraftDistribution


class Node:
    """A token below the path that leads to it."""

    __slots__ = (
        "checked",
        "children",
        "distribution",
        "length",
        "log_prob",
        "names",
        "order",
        "parent",
        "sources",
        "token",
    )

    def __init__(self, token: int, length: int, parent: Node | None = None, order: int = 0) -> None:
        self.token = token
        self.length = length  # tokens up to and including this one
        self.parent = parent  # None once committed or dead
        self.order = order  # of creation in the tree; breaks ties
        self.log_prob = 0.0
        self.checked = True  # False until it is known whether the token is allowed here
        self.distribution: DraftDistribution | None = None
        self.children: dict[int, Node] = {}  # in order of creation
        self.names: list[tuple[int, int]] = []
        self.sources: tuple[int, ...] = ()  # distinct sources of the names, in order of arrival

    def name(self, source: int, number: int) -> None:
        self.names.append((source, number))
        if source not in self.sources:
            self.sources += (source,)

    def unname(self, source: int) -> None:
        self.names = [name for name in self.names if name[0] != source]
        self.sources = tuple(other for other in self.sources if other != source)

    def descendants(self) -> Iterator[Node]:
        """All nodes below this one, in no particular order."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path(self) -> tuple[int, ...]:
        """The tokens from below the root down to this node."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))
