"""What a verifier step takes from a session's candidate tree: a connected piece of it, packed into arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slipstream.speculation.draft_distribution import DraftDistribution

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
    """Of each node given its parent."""
    path_log_probs: tuple[float, ...] = ()
    """Sum of log_probs from the root; never rises along a best-first selection."""
    distributions: tuple[DraftDistribution | None, ...] = ()
    sources: tuple[tuple[int, ...], ...] = ()
    """Of each node the drafters that sent it: the frames' `source`."""

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
        """The first `size` nodes: connected too, and of a best-first selection the best."""
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

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {edge: index for index, edge in enumerate(zip(self.parents, self.token_ids, strict=True))}

    @cached_property
    def _first_children(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for index, parent in enumerate(self.parents):
            first.setdefault(parent, index)
        return first
