"""Which proposed nodes join a session's tree, which of them are sent to the verifier, and when.

Under the coupled rule any choice is exact, so it is made for speed:

- Every node joins the drafter's own tree; those on likely paths are sent. What is unlikely today may be likely after
  the next commit, which divides every path probability by that of what was committed: then it is at hand, without a
  step. It costs the drafter a few words of memory and the stream nothing.
- A node that a verifier may be waiting for is sent at once, the others together: a frame costs more than its nodes.

Under the rule `rejection` the choice must not look at what was drawn: everything is sent, in the order of drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from drafter_svc.session import DraftSession
from slipstream.proposers.base import ProposedNode
from slipstream.proposers.draft_tree import DEEPEST, NEVER, UNSENT, DraftNode

URGENT = 0.2
"""A verifier waits for a candidate only if its path is likelier than about this."""
TOGETHER_S = 0.004
"""Seconds that less urgent nodes may wait for others: a fraction of any verifier's step."""


def join(session: DraftSession, places: Sequence[DraftNode], proposed: Sequence[ProposedNode]) -> None:
    """Adds what was proposed to the session's tree. `places`: the root that it was proposed for, then the nodes of its
    context."""
    if not session.sampling.drawn:
        _join_ranked(session, places, proposed)
    else:
        _join_drawn(session, places, proposed)


def _join_ranked(session: DraftSession, places: Sequence[DraftNode], proposed: Sequence[ProposedNode]) -> None:
    nodes: list[DraftNode | None] = [*places]
    for each in proposed:
        parent = nodes[1 + each.parent]
        node = None if parent is None else session.tree.add(parent, each.token, each.log_prob)
        if node is not None and parent is not None:
            parent.expanded = True  # also if it was opened again in the meantime
        nodes.append(node or (parent.children.get(each.token) if parent is not None else None))


def _join_drawn(session: DraftSession, places: Sequence[DraftNode], proposed: Sequence[ProposedNode]) -> None:
    """In the order of drawing, as many as there is room for.

    Whether a drawn token is there must not depend on its own value, nor on what was drawn below it or after it: here it
    depends on how many nodes there are and on whether its parent lives. What is below a node is drawn in a later step
    than the node and all its siblings, so this order is that of the rule too.
    """
    for each in proposed:
        parent = places[1 + each.parent]
        if session.tree.node_count >= session.policy.max_nodes:
            if not parent.children:  # it is expanded again: its noise is its own, so is its draw
                session.tree.reopen(parent)
        elif node := session.tree.add(parent, each.token, each.log_prob, each.distribution):
            session.tree.mark_sent(node)


def take_nodes_to_send(session: DraftSession, now: float, *, idle: bool = False) -> list[DraftNode]:
    """Marks as sent, and returns, the nodes to send at `now` (monotonic seconds), parents before children; none while
    they can wait for more. `idle`: no step is coming that could add to them."""
    tree = session.tree
    worthy = _worthy(session)
    if worthy and not idle:
        urgent = worthy[0].path_log_prob - tree.root.path_log_prob >= math.log(URGENT)
        if session.held_since is None:
            session.held_since = now
        if not urgent and now - session.held_since < TOGETHER_S:
            return tree.take_sent()
    session.held_since = None
    for node in worthy:
        tree.mark_sent(node)
    return tree.take_sent()


def _worthy(session: DraftSession) -> list[DraftNode]:
    """Unsent nodes on paths that are likely enough, likeliest first, as many as the policy has room for."""
    tree, policy = session.tree, session.policy
    room = policy.max_nodes - tree.sent_count
    if room <= 0:
        return []
    worthy = tree.unsent(room, math.log(max(policy.min_path_probability, NEVER)), DEEPEST)
    first = tree.favourite
    if first is not None and first.number == UNSENT and first not in worthy and len(worthy) < room:
        worthy.append(first)
    return worthy
