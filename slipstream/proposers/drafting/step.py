"""Which nodes of which sessions the next step of a drafting loop expands: a pure function of the sessions.

Sessions that decode come first, the smallest tree before the others, then those whose prompt is being read, with equal
shares of what is left. Where several tenants draft, each has its share of the step (`shares`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.proposers.base import UNLIMITED, ProposerContext
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.session import DraftSession
from slipstream.proposers.drafting.shares import PROMPTS, DraftShares, Want
from slipstream.proposers.expansion import FEWEST

ROUND = 16
"""Most unread committed tokens of a round; more are a prompt."""
PASS_NODES = 64
"""Most nodes of all sessions together that are expanded in one step, at least one of each session. Where more compete,
the next step comes sooner instead: depth is worth more than breadth, and what is not expanded now may be then.
"""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One session's part of one step."""

    session: DraftSession
    context: ProposerContext
    places: list[DraftNode]
    """The root, then the context's nodes: what the proposal's parent indices stand for."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes for it, as far as is known."""
        unread = self.context.length - self.session.computed
        deeper = self.context.deeper
        below = deeper.levels * deeper.expand if deeper is not None else 0
        return min(unread, self.context.max_read_tokens) + len(self.context.node_tokens) + below


@dataclass(frozen=True, slots=True)
class DraftStepLimits:
    tokens: int
    """Most tokens of one step."""
    expand: int = FEWEST
    """Most nodes of a session that are expanded in one step."""
    prompt_tokens: int = UNLIMITED
    """Most tokens of prompts in one step."""

    def expand_each(self, sessions: int) -> int:
        """Nodes that each of so many sessions may expand."""
        return min(self.expand, max(1, PASS_NODES // max(1, sessions)))


@dataclass(slots=True)
class DraftPlan:
    requests: list[DraftRequest] = field(default_factory=list)
    resting: list[DraftSession] = field(default_factory=list)
    """Sessions that have nothing to expand until something changes."""
    waiting: list[DraftSession] = field(default_factory=list)
    """Sessions for which the step has no room."""


def plan_step(
    sessions: Iterable[DraftSession],
    limits: DraftStepLimits,
    levels: int,
    tenants: Mapping[str, int],
    shares: DraftShares,
) -> DraftPlan:
    """`levels`: levels of nodes that one call may go down; `tenants`: how many sessions of each are open."""
    plan, ordered = DraftPlan(), sorted(sessions, key=lambda each: (each.pending > ROUND, each.tree.node_count))
    below = {tenant: limits.expand_each(len(tenants) * count) for tenant, count in tenants.items()}
    if len(tenants) > 1:
        levels = max(1, levels // len(tenants))  # no call is broken off for what another tenant wants meanwhile
        frontiers, given = _divided(ordered, limits, levels, below, shares)
    else:
        frontiers, given = shared_frontiers(ordered, limits.expand), None
    reading = sum(session.pending > ROUND for session, starts in zip(ordered, frontiers, strict=True) if starts)
    kept = limits.tokens // PROMPTS if reading else 0
    room, prompts = limits.tokens - kept, limits.prompt_tokens
    for session, starts in zip(ordered, frontiers, strict=True):
        share, is_prompt = room, session.pending > ROUND
        if is_prompt:
            room, kept = room + kept, 0
            share = min(room, max(ROUND, min(room, prompts) // max(reading, 1)))
        if given is not None and starts:
            share = min(share, given.get(session, 0)) if is_prompt else share
            if session not in given:
                plan.waiting.append(session)
                continue
        request = _request(session, starts, share, below[session.tenant], levels) if starts and room > 0 else None
        if request is not None:
            plan.requests.append(request)
            room -= request.tokens
            reading -= is_prompt
            prompts -= request.tokens if is_prompt else 0
        else:
            (plan.resting if room > 0 else plan.waiting).append(session)
    return plan


def plan_alone(session: DraftSession, limits: DraftStepLimits, levels: int) -> DraftRequest | None:
    """The session's part of a step without other sessions; None when it has nothing to expand."""
    starts = session.frontier(limits.expand)
    return _request(session, starts, limits.tokens, limits.expand, levels) if starts else None


def _divided(
    sessions: Sequence[DraftSession],
    limits: DraftStepLimits,
    levels: int,
    below: Mapping[str, int],
    shares: DraftShares,
) -> tuple[list[list[DraftNode]], dict[DraftSession, int]]:
    """The nodes to expand of each session, and what those that find room in the step may have of it."""
    found: dict[DraftSession, list[DraftNode]] = {}
    for tenant in below:
        own = [session for session in sessions if session.tenant == tenant]
        found |= zip(own, shared_frontiers(own, limits.expand, PASS_NODES // len(below)), strict=True)
    wants = [
        Want(
            each, each.pending + len(each.tree.above(starts)) + below[each.tenant] * (levels - 1), each.pending > ROUND
        )
        for each in sessions
        if (starts := found[each])
    ]
    return [found[session] for session in sessions], shares.divide(wants, list(below), levels, limits.tokens)


def shared_frontiers(sessions: Sequence[DraftSession], expand: int, most: int = PASS_NODES) -> list[list[DraftNode]]:
    """For each session the nodes to expand: its likeliest one, and of the others the likeliest of all sessions. Those
    under the ratio rule do not compete: how much is proposed must not depend on what was drawn."""
    frontiers = [session.frontier(expand) for session in sessions]
    competing = [not session.sampling.drawn for session in sessions]
    others = [
        (session.tree.root.path_log_prob - node.path_log_prob, number)
        for number, (session, starts) in enumerate(zip(sessions, frontiers, strict=True))
        if competing[number]
        for node in starts[1:]
    ]
    room = max(0, most - sum(map(len, frontiers)) + len(others))
    if len(others) <= room:
        return frontiers
    counts = Counter(number for _, number in sorted(others)[:room])
    return [starts[: 1 + counts[number]] if competing[number] else starts for number, starts in enumerate(frontiers)]


def _request(session: DraftSession, starts: list[DraftNode], room: int, below: int, levels: int) -> DraftRequest | None:
    """The session's part, which reads at most `room` committed tokens; None when there is nothing to expand."""
    while len(nodes := session.tree.above(starts)) > session.policy.max_nodes:
        starts.pop()
    if not starts:
        return None
    if session.pending > room:
        return DraftRequest(session, session.context([], [], room), [])
    for node in starts:
        node.expanded = True
    # A proposer that closed the sequence for others has to read it again: as a prompt, not at once.
    deeper = session.deeper(starts, below, levels)
    context = session.context(nodes, starts, max(session.pending, ROUND), deeper)
    return DraftRequest(session, context, [session.tree.root, *nodes])
