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
from slipstream.proposers.draft_tree import NEVER, DraftNode

URGENT = 0.2
"""A verifier waits for a candidate only if its path is likelier than about this."""
TOGETHER_S = 0.004
"""Seconds that less urgent nodes may wait for others: a fraction of any verifier's step."""


def join(session: DraftSession, places: Sequence[DraftNode], proposed: Sequence[ProposedNode]) -> None:
    """Adds what was proposed to the session's tree. `places`: the root that it was proposed for, then the nodes of its
    context."""
    if session.sampling.drawn:
        session.tree.join_drawn(places, proposed, session.policy.max_nodes)
    else:
        session.tree.join(places, proposed)


def take_nodes_to_send(session: DraftSession, now: float, *, idle: bool = False) -> list[DraftNode]:
    """Marks as sent, and returns, the nodes to send at `now` (monotonic seconds), parents before children; none while
    they can wait for more. `idle`: no step is coming that could add to them."""
    tree, policy = session.tree, session.policy
    worthy = tree.worth_sending(policy.max_nodes, math.log(max(policy.min_path_probability, NEVER)))
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
