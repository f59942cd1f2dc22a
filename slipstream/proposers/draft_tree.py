"""A drafter's candidate tree: the nodes proposed beyond the committed tokens, and where proposing more pays.

It mirrors the verifier's `slipstream.speculation.candidate_tree` and holds more than was sent: a node stays unsent
until it is worth its bytes, and gets the number that names it on the stream when it is sent, after its parent. Numbers
count within a generation and are kept while commits move the root along sent nodes; a commit that leaves them starts
the next generation: from nothing, or from an unsent node and what hangs below it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.proposers.base import DeeperLevels
from slipstream.speculation import noise
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.frame import Frame, TreeLimits
from slipstream.speculation.noise import Purpose

if TYPE_CHECKING:
    from slipstream.proposers.base import ProposedNode

ROOT = 0
"""Number of a generation's root."""
UNSENT = -1
DEEPEST = TreeLimits().depth
"""Tokens beyond the committed ones that a verifier's tree takes: what hangs below a node that it dropped is lost."""
NEVER = 1e-9
"""Path probability below which nothing is worth proposing, whatever the verifier asks for."""


@dataclass(slots=True, eq=False)
class DraftNode:
    """A proposed token. The root is a node too: it stands for the last committed token."""

    number: int
    """Names it on the stream; UNSENT before."""
    token: int
    parent: DraftNode | None
    depth: int
    log_prob: float = 0.0
    path_log_prob: float = 0.0
    """Sum of the log_probs from the generation's root down to the node."""
    distribution: DraftDistribution | None = None
    """Distribution that the token was drawn from, under a ratio rule."""
    expanded: bool = False
    """True once its children were proposed."""
    children: dict[int, DraftNode] = field(default_factory=dict)
    order: int = 0
    """Order of creation in the tree; breaks ties, and puts parents before their children."""
    lives: bool = True
    """False from when a commit left it aside."""

    @property
    def rank(self) -> Rank:
        return -self.path_log_prob, self.order, self


Rank = tuple[float, int, DraftNode]
"""Sorts the likeliest path first, and the older one among equals."""


class DraftTree:
    """Not thread-safe; owned by the event loop."""

    def __init__(self, base_length: int) -> None:
        self.generation = 0
        self.root = DraftNode(ROOT, -1, None, 0)
        self.node_count = 0
        """Live nodes below the root."""
        self._unsent: list[Rank] = []
        """Live nodes below the root that were not sent, sorted."""
        self._open: list[Rank] = []
        """Live nodes and the root, if they were not expanded when the root last moved; sorted."""
        self._newly_sent: list[DraftNode] = []
        self._order = 0
        self.restart(base_length)

    @property
    def sent_count(self) -> int:
        """Live nodes that were sent."""
        return self.node_count - len(self._unsent)

    @property
    def all_sent(self) -> bool:
        """Whether no live node is unsent."""
        return not self._unsent

    @property
    def favourite(self) -> DraftNode | None:
        """The root's first child: the best candidate for the next token, however bad."""
        return next(iter(self.root.children.values()), None)

    def add(
        self, parent: DraftNode, token: int, log_prob: float, distribution: DraftDistribution | None = None
    ) -> DraftNode | None:
        """Adds an unsent node; None when the parent is dead, or has that child already."""
        if token in parent.children or not parent.lives:
            return None
        # Rounding must not make a path likelier than its beginning: parents are sent before their children.
        path_log_prob = parent.path_log_prob + min(log_prob, 0.0)
        node = DraftNode(UNSENT, token, parent, parent.depth + 1, log_prob, path_log_prob, distribution)
        self._order = node.order = self._order + 1
        self.node_count += 1
        parent.children[token] = node
        rank = node.rank
        insort(self._unsent, rank)
        insort(self._open, rank)
        return node

    def join(self, places: Sequence[DraftNode], proposed: Sequence[ProposedNode]) -> list[DraftNode]:
        """Adds what was proposed, and returns what is new of it. `places`: the root that it was proposed for, then the
        nodes of its context."""
        joined: list[DraftNode] = []
        nodes: list[DraftNode | None] = [*places]
        for place, token, log_prob, _ in proposed:
            parent = nodes[1 + place]
            node = None if parent is None else self.add(parent, token, log_prob)
            if node is not None and parent is not None:
                parent.expanded = True  # also if it was opened again in the meantime
                joined.append(node)
            elif parent is not None:
                node = parent.children.get(token)
            nodes.append(node)
        return joined

    def join_drawn(self, places: Sequence[DraftNode], proposed: Sequence[ProposedNode], most_nodes: int) -> None:
        """Adds, and marks as sent, what was drawn under a ratio rule: in the order of drawing, as many as there is room
        for.

        Whether a drawn token is there must not depend on its own value, nor on what was drawn below it or after it:
        here it depends on how many nodes there are and on whether its parent lives. What is below a node is drawn in a
        later step than the node and all its siblings, so this order is that of the rule too.
        """
        for each in proposed:
            parent = places[1 + each.parent]
            if self.node_count >= most_nodes:
                if not parent.children:  # it is expanded again: its noise is its own, so is its draw
                    self.reopen(parent)
            elif node := self.add(parent, each.token, each.log_prob, each.distribution):
                self.mark_sent(node)

    def worth_sending(self, most_nodes: int, least_log_prob: float) -> list[DraftNode]:
        """Unsent nodes on paths that are likely enough, likeliest first, until `most_nodes` are sent."""
        room = most_nodes - self.sent_count
        if room <= 0:
            return []
        worthy = self.unsent(room, least_log_prob, DEEPEST)
        first = self.favourite
        if first is not None and first.number == UNSENT and first not in worthy and len(worthy) < room:
            worthy.append(first)
        return worthy

    def noise_stream(self, seed: int, number: int, epoch: int) -> int:
        """Key of the noise with which tokens are drawn under the ratio rule; a node's number gives each its own draws.
        `number` names an opening of the session: no two of one epoch share it.

        The rule is exact if no draw that it looked at influences the text after that round. It looks at draws along
        one path and at the siblings it rejected there. Accepted draws are committed; where all siblings were rejected,
        the commit leaves the tree and a generation begins with new noise, because its nodes are numbered from 1 again:

        - Within an opening, a generation begins on more tokens than all before it.
        - After a restart, reconnection or replacement a generation may begin on as many tokens as one whose draws are
          in a step in flight; but each opening has its own number, or a higher epoch.
        - Another verifier may use a number again, but goes on from committed tokens, which were decided by draws of
          generations on fewer tokens. A step that never became a commit influences nothing.
        - After a rollback to n tokens, generations on n tokens or more come again; what they led to is void.

        So a stream comes again only with the same committed tokens, and then as if for the first time.
        """
        opening = noise.key(noise.key(seed, number, Purpose.DRAFT), epoch, Purpose.DRAFT)
        return noise.key(opening, self.base_length, Purpose.DRAFT)

    def unsent(self, count: int, least_log_prob: float, max_depth: int) -> list[DraftNode]:
        """The `count` likeliest unsent nodes, best first, and parents before their children.

        Path log-probabilities count from the present root; nodes below `least_log_prob` or `max_depth` are left.
        """
        return self._best(self._unsent, count, least_log_prob, max_depth, expanded=True)

    def reopen(self, node: DraftNode) -> None:
        """Makes the node one to expand again, because nothing was proposed below it after all."""
        if node.expanded and node.lives:
            self._open = [rank for rank in self._open if not rank[2].expanded]  # the node may be among them
            node.expanded = False
            insort(self._open, node.rank)

    def mark_sent(self, node: DraftNode) -> None:
        """Gives the node its number. Its parent must have one."""
        assert node.parent is not None and node.parent.number != UNSENT
        self._last_number += 1
        node.number = self._last_number
        self._unsent.remove(node.rank)
        self._newly_sent.append(node)

    def take_sent(self) -> list[DraftNode]:
        """The nodes marked as sent since the last call, in order of their numbers."""
        sent, self._newly_sent = self._newly_sent, []
        return sent

    def frame(self, nodes: Sequence[DraftNode], source: int = 0) -> Frame:
        """The frame of these nodes, which were marked as sent one after the other. One without nodes marks that those
        sent before are no candidates any more, if a generation began since."""
        distributions = tuple([node.distribution for node in nodes])
        return Frame(
            base_length=self.base_length,
            generation=self.generation,
            first_node=nodes[0].number if nodes else 1,
            token_ids=tuple([node.token for node in nodes]),
            log_probs=tuple([node.log_prob for node in nodes]),
            parents=tuple([node.parent.number if node.parent is not None else ROOT for node in nodes]),
            distributions=distributions if any(distributions) else (),
            source=source,
        )

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Moves the root along committed tokens. False when they left the sent nodes, so that a generation begins."""
        node = self.root
        self._committed += len(token_ids)
        for token in token_ids:
            child = node.children.pop(token, None)
            self._drop(node)
            if child is None:
                self.restart(self._committed)
                return False
            self.node_count -= 1
            node = child
        self.root = node
        node.parent = None
        self._unsent = [rank for rank in self._unsent if rank[2].lives and rank[2] is not node]
        self._open = [rank for rank in self._open if rank[2].lives and not rank[2].expanded]
        if node.number != UNSENT:
            return True
        if not node.children:
            # A verifier whose tree was left expects a step of every drafter, also where nothing was proposed.
            self.reopen(node)
        self._begin(self._committed)
        node.number = ROOT
        return False

    def restart(self, length: int) -> None:
        """A new generation, from nothing, after a committed prefix of `length` tokens."""
        self._drop(self.root)
        self.root = DraftNode(ROOT, -1, None, 0)
        self._unsent, self._open = [], [self.root.rank]
        self._begin(length)

    def nodes(self) -> Iterator[DraftNode]:
        """Live nodes below the root, every parent before its children, older siblings first."""
        stack = [*reversed(self.root.children.values())]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def above(self, starts: Sequence[DraftNode]) -> list[DraftNode]:
        """`starts` and all nodes above them but the root, every parent before its children: what a pass computes."""
        needed: dict[DraftNode, None] = {}
        for start in starts:
            path: list[DraftNode] = []
            node: DraftNode | None = start
            while node is not None and node is not self.root and node not in needed:
                path.append(node)
                node = node.parent
            needed.update(dict.fromkeys(reversed(path)))
        return list(needed)

    def frontier(self, count: int, least_log_prob: float, max_depth: int) -> list[DraftNode]:
        """The `count` likeliest nodes, root included, that were not expanded yet, best first.

        Path log-probabilities count from the present root; nodes below `least_log_prob` or at `max_depth` are left.
        """
        return self._best(self._open, count, least_log_prob, max_depth - 1, expanded=False)

    def deeper(
        self, starts: Sequence[DraftNode], count: int, levels: int, least_log_prob: float, max_depth: int
    ) -> DeeperLevels | None:
        """Returns the levels to propose below the nodes that are proposed below `starts`, the frontier of at most
        `count` nodes: `levels` levels in all, as long as they are likelier than what else there is to expand."""
        if levels <= 1:
            return None
        deepest = max(node.depth for node in starts) - self.root.depth
        further = min(levels, max_depth - deepest) - 1
        if further <= 0:
            return None
        paths = [node.path_log_prob for node in starts]
        least = self.root.path_log_prob + least_log_prob
        return DeeperLevels(further, count, paths, least if len(starts) < count else max(least, min(paths)))

    def _best(
        self, ranked: list[Rank], count: int, least_log_prob: float, max_depth: int, *, expanded: bool
    ) -> list[DraftNode]:
        """The first `count` on paths at least so likely, down to `max_depth` tokens below the root. `expanded`: also
        those that were expanded."""
        worst = -(self.root.path_log_prob + least_log_prob)
        deepest = self.root.depth + max_depth
        best: list[DraftNode] = []
        for unlikelihood, _, node in ranked:
            if unlikelihood > worst or len(best) == count:
                break
            if node.depth <= deepest and (expanded or not node.expanded):
                best.append(node)
        return best

    def _drop(self, node: DraftNode) -> None:
        """Takes apart what hangs below a node that was the root: cycles of parents and children would wait for the
        garbage collector, and a chain of old roots for its oldest generation."""
        stack = [node]
        while stack:
            dead = stack.pop()
            dead.lives = False
            self.node_count -= len(dead.children)
            stack.extend(dead.children.values())
            dead.children = {}

    def _begin(self, length: int) -> None:
        """Starts the next generation after `length` committed tokens."""
        self.generation += 1
        self.base_length = self._committed = length
        self._last_number = ROOT
        self._newly_sent = []
