"""One frame: the unit in which drafters send candidates to a verifier.

A drafter pushes frames as it drafts and never waits for an answer; the verifier checks each frame here and grafts it on
the session's candidate tree. A drafter may be faulty or hostile, so the check bounds everything that a frame can cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from operator import lt
from types import MappingProxyType
from typing import NamedTuple, Protocol

from slipstream.errors import PROTOCOL, InvalidArgument
from slipstream.speculation.draft_distribution import DraftDistribution

_ROUNDING = 1e-6
"""A log-softmax may end this far above zero."""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds on what one session's drafters can make the verifier hold."""

    nodes: int = 256
    """Most live nodes of one tree."""
    depth: int = 64
    """Most tokens of a path below the committed prefix."""
    frame_nodes: int = 256
    """Most nodes of one frame."""
    window: int = 128
    """Committed tokens that are remembered, so that frames on an older prefix can still be placed."""


class Distributions(Protocol):
    """One distribution for each node, or none at all. The tree reads those of the nodes that it adds, and no others: a
    received one is checked when it is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> DraftDistribution | None: ...


class Frame(NamedTuple):
    """Nodes first_node, first_node + 1, ... of one (source, generation).

    Parent 0 is the generation's root: the committed prefix of `base_length` tokens, constant within a generation.
    Without `parents` every node hangs on the number before its own.
    """

    base_length: int
    generation: int
    first_node: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """The drafter's log-probability of each node, given its parent."""
    parents: tuple[int, ...] = ()
    distributions: Distributions = ()
    """The distribution that each token was drawn from; only the rule `rejection` needs it."""
    source: int = 0
    """The drafter that sent the frame: a small number given by the receiver, not sent over the network."""

    def parent_of(self, index: int) -> int:
        return self.parents[index] if self.parents else self.first_node + index - 1


class Grafted(NamedTuple):
    """Result of grafting a frame; added + merged + committed + sum(dropped) is its number of nodes."""

    added: int = 0
    merged: int = 0
    """Candidates that were there already, of another drafter mostly: two that agree are right more often than one."""
    committed: int = 0
    """Nodes on the committed path."""
    dropped: Mapping[str, int] = MappingProxyType({})
    """Nodes by reason: stale, duplicate, orphan, diverged, deep, full, forbidden."""


def check(frame: Frame, vocabulary_size: int, limits: TreeLimits) -> Frame:
    """The frame, with log-probabilities that rounding put above zero clamped to it. Raises InvalidArgument for a frame
    that no correct drafter sends."""
    size = len(frame.token_ids)
    if size > limits.frame_nodes:
        raise InvalidArgument(f"a frame holds {size} nodes; send at most {limits.frame_nodes}.", reason=PROTOCOL)
    if frame.first_node < 1 or frame.base_length < 0 or frame.generation < 0:
        raise InvalidArgument("first_node starts at 1; base_length and generation are not negative.", reason=PROTOCOL)
    if len(frame.log_probs) != size or len(frame.parents) not in (0, size) or len(frame.distributions) not in (0, size):
        raise InvalidArgument(
            "token_ids, parents, log_probs and distributions must have one entry for each node.", reason=PROTOCOL
        )
    if size and not (min(frame.token_ids) >= 0 and max(frame.token_ids) < vocabulary_size):
        raise InvalidArgument(f"a candidate lies outside the vocabulary of {vocabulary_size} tokens.", reason=PROTOCOL)
    if min(frame.parents, default=0) < 0 or not all(map(lt, frame.parents, count(frame.first_node))):
        raise InvalidArgument("a node's parent must have a smaller number than the node.", reason=PROTOCOL)
    highest = max(frame.log_probs, default=0.0)
    if not all(map(math.isfinite, frame.log_probs)) or highest > _ROUNDING:
        raise InvalidArgument("log_probs must be finite and not positive.", reason=PROTOCOL)
    if highest > 0.0:
        return frame._replace(log_probs=tuple(min(value, 0.0) for value in frame.log_probs))
    return frame
