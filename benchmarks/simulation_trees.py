"""What drafters guess with all the time in the world: the tree of each position of a text, by the real proposers.

Every tree starts from nothing on the true prefix and is grown best first until its `enough` likeliest nodes cannot
change any more, so that a choice of up to `enough` nodes is that of an infinitely fast drafter.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from benchmarks.simulation_texts import LOOKAHEAD, Key, Text
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import UNLIMITED, ProposedNode, Proposer
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.proposers.drafting.step import DraftRequest
from slipstream.speculation.frame import Frame

_LEAST = math.log(1e-4)
"""Path probability of a guess that no choice would ever reach."""


@dataclass(frozen=True, slots=True)
class Grown:
    """The guesses of one drafter after one prefix, parents before children."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """1 + index of the parent; 0 is the root."""
    log_probs: tuple[float, ...]
    """The drafter's confidence in each node given its parent."""
    ranks: tuple[int, ...]
    """0 for the first guess below a node, 1 for the next."""
    passes: tuple[int, ...]
    """The drafting pass that made each node, from 1."""

    def frame(self, base_length: int, source: int) -> Frame:
        """As the drafter would send it."""
        return Frame(base_length, 1, 1, self.token_ids, self.log_probs, self.parents, source=source)


def grow(proposer: Proposer, texts: list[Text], enough: int, expand: int) -> dict[Key, list[Grown]]:
    """Trees of each text at all its `rounds`. `expand` nodes of each tree are guessed on in one pass."""
    sessions = [_session(text) for text in texts]
    trees: list[list[Grown]] = [[] for _ in texts]
    for step in range(max(len(text.rounds) for text in texts)):
        live = [number for number, text in enumerate(texts) if step < len(text.rounds)]
        passes = _grow(proposer, [sessions[number] for number in live], enough, expand)
        for number in live:
            session, text = sessions[number], texts[number]
            trees[number].append(_snapshot(session, passes))
            session.commit(len(session.tokens), [text.tokens[len(session.tokens)]])
            session.tree.restart(len(session.tokens))
    for session in sessions:
        proposer.close_sequence(session)
    return {text.key: grown for text, grown in zip(texts, trees, strict=True)}


def _session(text: Text) -> DraftSession:
    policy = DraftPolicy(max_nodes=1 << 20, min_path_probability=0.0)
    prefix = text.tokens[: text.prompt_length]
    return DraftSession(0, text.sampling, policy, prefix, text.prompt_length, len(text.tokens) + LOOKAHEAD)


def _grow(proposer: Proposer, sessions: list[DraftSession], enough: int, expand: int) -> dict[DraftNode, int]:
    """Grows the trees side by side; returns the pass that made each node."""
    made: dict[DraftNode, int] = {}
    number = 0
    while requests := [one for session in sessions if (one := _request(session, enough, expand)) is not None]:
        number += 1
        for request, answer in zip(requests, proposer.propose([one.context for one in requests]), strict=True):
            if isinstance(answer, SlipstreamError):
                raise answer
            for node in _add(request, answer.nodes):
                made.setdefault(node, number)
    return made


def _request(session: DraftSession, enough: int, expand: int) -> DraftRequest | None:
    """The next pass's part of a session; None once its `enough` likeliest nodes are known."""
    starts = session.frontier(expand)
    best = heapq.nlargest(enough, (node.path_log_prob for node in session.tree.nodes()))
    if not starts or (len(best) == enough and starts[0].path_log_prob <= best[-1]):
        return None
    for node in starts:
        node.expanded = True
    # Leaves that are not guessed on would only cost time.
    needed = {above for node in starts for above in _above(node)}
    nodes = [node for node in session.tree.nodes() if node in needed]
    return DraftRequest(session, session.context(nodes, starts, UNLIMITED), [session.tree.root, *nodes])


def _above(node: DraftNode) -> list[DraftNode]:
    """The node and what stands above it, the root excluded."""
    path: list[DraftNode] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _add(request: DraftRequest, proposed: list[ProposedNode]) -> list[DraftNode]:
    nodes: list[DraftNode | None] = [*request.places]
    for one in proposed:
        parent = nodes[1 + one.parent]
        # A lookup proposes again what it proposed from further above: that node is there already.
        added = parent and (request.session.tree.add(parent, one.token, one.log_prob) or parent.children[one.token])
        nodes.append(added)
    return [node for node in nodes[len(request.places) :] if node is not None]


def _snapshot(session: DraftSession, made: dict[DraftNode, int]) -> Grown:
    nodes = [node for node in session.tree.nodes() if node.path_log_prob >= _LEAST]
    numbers = {node: number for number, node in enumerate(nodes, 1)}
    parents = [node.parent for node in nodes]
    return Grown(
        tuple(node.token for node in nodes),
        tuple(numbers.get(parent, 0) if parent else 0 for parent in parents),
        tuple(node.log_prob for node in nodes),
        tuple(
            list(parent.children).index(node.token) if parent else 0
            for node, parent in zip(nodes, parents, strict=True)
        ),
        tuple(made[node] for node in nodes),
    )
