"""The candidate tree of one session, as the verifier keeps it.

Candidates are hints; only commits are the truth. Drafters' frames are grafted on, a commit moves the root along its
tokens, and what hangs elsewhere falls off: that is rollback. Nodes that say the same (same token, same parent) are
one node, whoever sent them.

A node has names, (source, number within the source's generation), and a name leads to the node until it dies.
Committed nodes keep theirs, so that a drafter which does not know of the commit yet may go on naming them as parents;
what it hangs there on a position that is committed already counts as the committed node if the token is the same, and
is dead otherwise.

Memory is bounded by `TreeLimits`: live nodes by `nodes`; committed nodes are remembered for `window` tokens and then
forgotten with their names; dead nodes lose theirs at once; one source has at most `nodes + window` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from slipstream.errors import FailedPrecondition, InvalidArgument, OutOfRange
from slipstream.speculation.frame import Frame, Grafted, TreeLimits
from slipstream.speculation.node import Node
from slipstream.speculation.selection import (
    Selection,
    select_first_children,
    select_first_created,
    select_likeliest,
    select_likeliest_chain,
)


class _Source:
    """What one drafter's current generation has named."""

    __slots__ = ("base", "generation", "names")

    def __init__(self) -> None:
        self.generation = -1
        self.base = -1  # committed length at the generation's root; -1: no frame of it came yet
        self.names: dict[int, Node] = {}


class CandidateTree:
    """Not thread-safe; one owner."""

    def __init__(self, committed: Sequence[int], limits: TreeLimits | None = None) -> None:
        """`committed` is the whole prefix; the tree keeps its own copy of the last `window` tokens."""
        self.limits = limits or TreeLimits()
        self.version = 0
        """Grows with every change."""
        self.admits: Callable[[tuple[int, ...], int], bool] | None = None
        """Whether a new candidate may stand below this path from the root; None: all may."""
        self._order = self._nodes = 0
        self._dead: list[Node] = []
        """Roots of what fell off: still counted and named, until somebody asks. A commit stands between two steps, and
        the time to clear up is while the next one runs."""
        self._sources: dict[int, _Source] = {}
        start = max(0, len(committed) - self.limits.window)
        self._trail = [Node(-1, start)]  # committed nodes by length, oldest first; the last one is the root
        self._trail += [Node(token, start + index + 1) for index, token in enumerate(committed[start:])]

    @property
    def base_length(self) -> int:
        """Length of the committed prefix."""
        return self._root.length

    @property
    def node_count(self) -> int:
        """Live candidates."""
        self._bury()
        return self._nodes

    @property
    def empty(self) -> bool:
        return not self._root.children

    def holds(self, count: int) -> bool:
        """Whether there are so many live candidates; cheaper than to count them all."""
        return count <= 0 or next(islice(self._root.descendants(), count - 1, None), None) is not None

    @property
    def depth(self) -> int:
        """Of the deepest candidate; 0 when empty."""
        return max((node.length for node in self._root.descendants()), default=self.base_length) - self.base_length

    def follows(self, source: int) -> bool:
        """Whether the last committed token was a candidate of this drafter: if not, its tree was left."""
        return source in self._root.sources

    def graft(self, frame: Frame) -> Grafted:
        """Adds a checked frame's nodes. Raises FailedPrecondition when it stands on tokens that are not committed, and
        InvalidArgument when it moves its generation's root; the tree is unchanged then."""
        self._bury()
        source = self._sources.get(frame.source)
        if source is None:
            source = self._sources[frame.source] = _Source()
        if frame.generation < source.generation:
            return Grafted(dropped={"stale": len(frame.token_ids)} if frame.token_ids else {})
        if frame.base_length > self.base_length:
            raise FailedPrecondition(
                f"candidates stand on {frame.base_length} tokens, but {self.base_length} are committed.",
                reason="CANDIDATES_AHEAD",
            )
        if frame.generation > source.generation or source.base < 0:
            self._unname(frame.source, source)
            source.generation, source.base = frame.generation, frame.base_length
        if frame.base_length != source.base:
            raise InvalidArgument("base_length changed within a generation; start a new generation instead.")
        fates: dict[str, int] = {}
        for index, token in enumerate(frame.token_ids):
            fate = self._graft_node(frame, index, token, source)
            fates[fate] = fates.get(fate, 0) + 1
        self.version += 1
        return Grafted(fates.pop("added", 0), fates.pop("merged", 0), fates)

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Moves the root along these tokens, inside the tree or out of it. Returns whether one of them was none of the
        candidates for its place: with no candidates there, nobody was wrong."""
        diverged = False
        self.version += 1
        for token in token_ids:
            root = self._root
            kept = root.children.pop(token, None)
            diverged = diverged or (kept is None and bool(root.children))
            self._kill(root)
            if kept is None:
                kept = Node(token, root.length + 1)
            else:
                self._nodes -= 1
                kept.parent = None
            self._trail.append(kept)
        excess = len(self._trail) - self.limits.window - 1
        if excess > 0:
            for node in self._trail[:excess]:
                self._forget_names(node)
            del self._trail[:excess]
        return diverged

    def rollback(self, length: int) -> None:
        """Shortens the committed prefix and empties the tree; frames of the generations so far are stale from now on.

        Raises OutOfRange for a length beyond the committed one. When the prefix is cut to before the remembered
        window, frames must stand on exactly `length` or more.
        """
        if not 0 <= length <= self.base_length:
            raise OutOfRange(f"cannot roll back to {length}; {self.base_length} tokens are committed.")
        self._kill(self._root)
        self._bury()
        self.version += 1
        for source in self._sources.values():
            # Once per generation: of two rollbacks in a row, a drafter may notice only the second.
            source.generation += source.base >= 0
            source.base = -1
            source.names.clear()
        self._trail = [node for node in self._trail if node.length <= length] or [Node(-1, length)]
        for node in self._trail:
            node.names.clear()
            node.sources = ()

    def forget(self, source: int) -> None:
        """A drafter is gone: drops what only it vouches for. The number may be used for another one, from any
        generation.
        """
        self._bury()
        self.version += 1
        gone = self._sources.pop(source, None)
        if gone is not None:
            self._unname(source, gone)

    def select(self, budget: int) -> Selection:
        """The likeliest nodes, as the `coupled` rule takes them."""
        return select_likeliest(self._root, budget)

    def select_likeliest_chain(self, budget: int) -> Selection:
        """The likeliest path, for engines that verify chains only."""
        return select_likeliest_chain(self._root, budget)

    def select_chain(self, budget: int) -> Selection:
        """One chain, chosen without a look at its tokens, as a ratio rule needs it."""
        return select_first_children(self._root, budget)

    def select_drawn(self, budget: int) -> Selection:
        """Nodes in the order of drawing, siblings included, as a ratio rule needs them."""
        return select_first_created(self._root, budget)

    @property
    def _root(self) -> Node:
        return self._trail[-1]

    def _graft_node(self, frame: Frame, index: int, token: int, source: _Source) -> str:
        """Places one node; returns its fate: added, merged, or why it was dropped."""
        number = frame.first_node + index
        if number in source.names:
            return "duplicate"
        parent_number = frame.parent_of(index)
        parent = source.names.get(parent_number) if parent_number else self._committed(source.base)
        if parent is None:
            return "orphan"
        if len(source.names) >= self.limits.nodes + self.limits.window:
            return "full"
        if parent.length < self._root.length:
            node = self._committed(parent.length + 1)
            if node is None or node.token != token:
                return "diverged"
            fate = "merged"
        else:
            node, fate = self._child(parent, token, frame, index)
            if node is None:
                return fate
        source.names[number] = node
        node.name(frame.source, number)
        return fate

    def _child(self, parent: Node, token: int, frame: Frame, index: int) -> tuple[Node | None, str]:
        node = parent.children.get(token)
        if node is not None:
            node.log_prob = max(node.log_prob, frame.log_probs[index])
            return node, "merged"
        if parent.length - self.base_length >= self.limits.depth:
            return None, "deep"
        if self._nodes >= self.limits.nodes:
            return None, "full"
        if self.admits is not None and not self.admits(parent.path(), token):
            return None, "forbidden"
        self._order += 1
        self._nodes += 1
        node = parent.children[token] = Node(token, parent.length + 1, parent, self._order)
        node.log_prob = frame.log_probs[index]
        if frame.distributions:
            node.distribution = frame.distributions[index]
        return node, "added"

    def _committed(self, length: int) -> Node | None:
        """The committed node at this length; None once it has left the window."""
        index = length - self._trail[0].length
        return self._trail[index] if 0 <= index < len(self._trail) else None

    def _kill(self, node: Node) -> None:
        """Everything below this node dies."""
        if node.children:
            self._dead.extend(node.children.values())
            node.children = {}

    def _bury(self) -> None:
        """Takes the dead from the count and from the names."""
        while self._dead:
            dead = self._dead.pop()
            self._dead.extend(dead.children.values())
            self._forget_names(dead)
            dead.parent = None
            self._nodes -= 1

    def _forget_names(self, node: Node) -> None:
        for source, number in node.names:
            del self._sources[source].names[number]
        node.names.clear()
        node.sources = ()

    def _unname(self, number: int, source: _Source) -> None:
        """Takes back all names of a source's generation. Live nodes without any name die; whoever names a node names
        its ancestors too, so no other node hangs on them.
        """
        for node in source.names.values():
            node.unname(number)
            if not node.names and node.parent is not None:
                node.parent.children.pop(node.token, None)
                node.parent = None
                self._nodes -= 1
        source.names.clear()
