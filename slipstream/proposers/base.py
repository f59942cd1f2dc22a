"""Proposers: one file for each way of guessing, behind one small protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from drafter_svc.session import DraftSession
from drafter_svc.tree import DraftNode
from slipstream.errors import SlipstreamError
from slipstream.speculation.draft_distribution import DraftDistribution


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one session brings to one step: a snapshot, for the session goes on changing while the model runs."""

    session: DraftSession
    revision: int
    computed: int
    pending: list[int]
    """Committed tokens after the first `computed` ones, at least one."""
    nodes: list[DraftNode]
    """The tree below the last pending token, parents before children; empty for an unfinished prefill."""
    tokens: list[int]
    """Of the nodes."""
    parents: list[int]
    """Of the nodes: an index, or -1 for the root."""
    expand: list[int]
    """Where guesses are asked for: indices of nodes, or -1 for the root; empty for an unfinished prefill."""
    starts: list[DraftNode]
    """The nodes behind `expand`."""

    def path(self, index: int) -> list[int]:
        """The guessed tokens from below the root down to node `index`."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.tokens[index])
            index = self.parents[index]
        return tokens[::-1]


@dataclass(frozen=True, slots=True)
class ProposedNode:
    """One more node of a session's tree."""

    parent: DraftNode | int
    """A node of the tree, or the index of an earlier guess of the same answer."""
    token: int
    log_prob: float
    proposal: DraftDistribution | None = None


Answer = list[ProposedNode] | SlipstreamError
"""Guesses best first, parents before children; none for an unfinished prefill; or the session's typed failure."""


class Proposer(Protocol):
    """Called on the model's own thread only."""

    draws: bool
    """Whether it can draw its guesses and say from what, as the ratio rules need."""

    def grow(self, turns: list[DraftRequest]) -> list[Answer]:
        """One step for many sessions."""
        ...

    def close(self, session: DraftSession) -> None:
        """Give back what the session holds; harmless twice."""
        ...
