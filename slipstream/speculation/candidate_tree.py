"""The candidate tree of one session: the one data structure that every method of drafting feeds.

Drafters' frames are grafted onto it, each step verifies a selection of it, and a commit moves its root along the
committed tokens. What does not hang below the new root falls off; the tree never decides a token.

Nodes with the same token and parent are one node, whichever sources sent them. A node has names, (source, number within
the source's generation), which lead to it until it dies. Committed nodes keep their names, so that a drafter which has
not received the commit yet can still name them as parents. A child that it sends at a committed position merges with
the committed node if the token is the same, and is dropped otherwise.

Memory is bounded by `TreeLimits`: live nodes by `nodes`; committed nodes are remembered for `window` tokens and then
forgotten with their names; dead nodes lose their names at once; one source has at most `nodes + window` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from slipstream.errors import PROTOCOL, FailedPrecondition, InvalidArgument
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
    """The names of one drafter's current generation."""

    __slots__ = ("base", "generation", "names")

    def __init__(self) -> None:
        self.generation = -1
        self.base = -1  # committed length at the generation's root; -1 before its first frame
        self.names: dict[int, Node] = {}


class CandidateTree:
    """The candidates of one session, below its committed tokens. Not thread-safe."""

    def __init__(self, committed: Sequence[int], limits: TreeLimits | None = None) -> None:
        """`committed` is the whole prefix; the tree copies the last `window` tokens of it."""
        self.limits = limits or TreeLimits()
        self.version = 0
        """Incremented by every change."""
        self.admits: Callable[[tuple[int, ...], int], bool | None] | None = None
        """Called with a path from the root and a token: whether the token is allowed there; None where that is not
        known yet. Without it all tokens are allowed."""
        self._unchecked: list[Node] = []
        """Nodes about which `admits` had no answer, and some that fell off. They are in no selection."""
        self._order = self._nodes = 0
        self._dead: list[Node] = []
        """Roots of subtrees that fell off. They are removed from counts and names later: a commit stands between two
        steps, and the time to clear up is while the next one runs."""
        self._sources: dict[int, _Source] = {}
        start = max(0, len(committed) - self.limits.window)
        self._trail = [Node(-1, start)]  # committed nodes by length, oldest first; the last one is the root
        self._trail += [Node(token, start + index + 1) for index, token in enumerate(committed[start:])]

    @property
    def base_length(self) -> int:
        """Tokens of the committed prefix."""
        return self._root.length

    @property
    def node_count(self) -> int:
        """Number of live candidates."""
        self._remove_dead()
        return self._nodes

    @property
    def empty(self) -> bool:
        return not self._root.children

    @property
    def merged(self) -> bool:
        """Whether candidates of several drafters may be in the tree."""
        return len(self._sources) > 1

    def holds(self, count: int, source: int) -> bool:
        """Whether there are at least `count` live candidates of this drafter; cheaper than counting them all."""
        own = (node for node in self._root.descendants() if source in node.sources)
        return count <= 0 or next(islice(own, count - 1, None), None) is not None

    @property
    def depth(self) -> int:
        """Depth of the deepest candidate below the root; 0 for an empty tree."""
        return max((node.length for node in self._root.descendants()), default=self.base_length) - self.base_length

    def follows(self, source: int) -> bool:
        """Whether the last committed token was a candidate of this drafter; otherwise the text has left its tree."""
        return source in self._root.sources

    def graft(self, frame: Frame) -> Grafted:
        """Adds a checked frame's nodes. Raises FailedPrecondition for a frame that stands on uncommitted tokens, and
        InvalidArgument for one that moves its generation's root; the tree is then unchanged. Raises InvalidArgument
        for a new node's distribution that is not valid; the nodes before it are then in the tree."""
        self._remove_dead()
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
            raise InvalidArgument(
                "base_length changed within a generation; start a new generation instead.", reason=PROTOCOL
            )
        fates: dict[str, int] = {}
        self.version += 1
        for index, token in enumerate(frame.token_ids):
            fate = self._graft_node(frame, index, token, source)
            fates[fate] = fates.get(fate, 0) + 1
        return Grafted(fates.pop("added", 0), fates.pop("merged", 0), fates.pop("committed", 0), fates)

    def recheck(self) -> int:
        """Asks `admits` again about the nodes for which it had no answer. Returns how many candidates are forbidden:
        they fall off, with what stands below them."""
        assert self.admits is not None
        self._remove_dead()
        before, waiting, self._unchecked = self._nodes, self._unchecked, []
        for node in waiting:
            if node.parent is None:  # committed or fallen off
                continue
            allowed = self.admits(node.parent.path(), node.token)
            if allowed is None:
                self._unchecked.append(node)
            elif allowed:
                node.checked = True
            else:
                del node.parent.children[node.token]
                self._dead.append(node)
        self._remove_dead()
        self.version += 1
        return before - self._nodes

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Moves the root along these tokens, inside the tree or out of it. Returns whether a token missed the
        candidates at its position; a position without candidates is no miss."""
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

    def forget(self, source: int) -> None:
        """Removes a lost drafter: its names, and nodes that only it sent. Its number may be used again."""
        self._remove_dead()
        self.version += 1
        gone = self._sources.pop(source, None)
        if gone is not None:
            self._unname(source, gone)

    def select_likeliest(self, budget: int) -> Selection:
        """The likeliest nodes, as the `coupled` rule takes them."""
        return select_likeliest(self._root, budget)

    def select_likeliest_chain(self, budget: int) -> Selection:
        """The likeliest path, for executors that verify chains only."""
        return select_likeliest_chain(self._root, budget)

    def select_first_children(self, budget: int) -> Selection:
        """One chain, chosen without a look at its tokens: what the ratio rule takes where only chains are verified."""
        return select_first_children(self._root, budget)

    def select_first_created(self, budget: int) -> Selection:
        """Nodes in the order of drawing, siblings included, as the ratio rule needs them."""
        return select_first_created(self._root, budget)

    @property
    def _root(self) -> Node:
        return self._trail[-1]

    def _graft_node(self, frame: Frame, index: int, token: int, source: _Source) -> str:
        """Places one node. Returns `added`, `merged`, `committed`, or the reason for which it was dropped."""
        number, names, limits = frame.first_node + index, source.names, self.limits
        if number in names:
            return "duplicate"
        parent_number = frame.parent_of(index)
        parent = names.get(parent_number) if parent_number else self._committed(source.base)
        if parent is None:
            return "orphan"
        if len(names) >= limits.nodes + limits.window:
            return "full"
        depth = parent.length - self._trail[-1].length
        if depth < 0:
            node = self._committed(parent.length + 1)
            if node is None or node.token != token:
                return "diverged"
            fate = "committed"
        else:
            node, fate = self._child(parent, depth, token, frame, index)
            if node is None:
                return fate
        names[number] = node
        node.name(frame.source, number)
        return fate

    def _child(self, parent: Node, depth: int, token: int, frame: Frame, index: int) -> tuple[Node | None, str]:
        node = parent.children.get(token)
        if node is not None:
            node.log_prob = max(node.log_prob, frame.log_probs[index])
            return node, "merged"
        if depth >= self.limits.depth:
            return None, "deep"
        if self._nodes >= self.limits.nodes:
            return None, "full"
        allowed = True if self.admits is None else self.admits(parent.path(), token)
        if allowed is False:
            return None, "forbidden"
        distribution = frame.distributions[index] if frame.distributions else None  # raises, so nothing changed yet
        self._order += 1
        self._nodes += 1
        node = parent.children[token] = Node(token, parent.length + 1, parent, self._order)
        node.log_prob = frame.log_probs[index]
        node.distribution = distribution
        if allowed is None:
            node.checked = False
            self._unchecked.append(node)
        return node, "added"

    def _committed(self, length: int) -> Node | None:
        """The committed node at this length; None once it has left the window."""
        index = length - self._trail[0].length
        return self._trail[index] if 0 <= index < len(self._trail) else None

    def _kill(self, node: Node) -> None:
        """Cuts off everything below this node."""
        if node.children:
            self._dead.extend(node.children.values())
            node.children = {}

    def _remove_dead(self) -> None:
        """Takes dead subtrees out of the count and the names."""
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
        """Removes all names of a source's generation. Live nodes without any name die; a source that names a node
        names its ancestors too, so no other node hangs below them."""
        for node in source.names.values():
            node.unname(number)
            if not node.names and node.parent is not None:
                node.parent.children.pop(node.token, None)
                node.parent = None
                self._nodes -= 1
        source.names.clear()
