"""Proposers that run inside the verifier, as a source of candidates: no network, no second process.

A lookup takes microseconds, so it runs on the event loop right before a step is planned: its candidates are always
there, and no step waits for them. A draft model takes milliseconds, so it runs ahead of the verifier on a thread of its
own, in one packed pass for all sessions at a time, and the wait policy decides how long a step waits for it, as for a
remote drafter. Candidates join the sessions' trees through the same checks and under the same labels as remote ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.engine.model_thread import ModelThread
from slipstream.errors import FailedPrecondition, Internal, ResourceExhausted, SlipstreamError
from slipstream.proposers.base import (
    ROOT,
    UNLIMITED,
    DeeperLevels,
    OpenedProposer,
    Proposal,
    ProposerContext,
)
from slipstream.proposers.draft_tree import DEEPEST, NEVER, DraftNode, DraftTree
from slipstream.proposers.expansion import FEWEST
from slipstream.proposers.level_budget import LevelBudget
from slipstream.proposers.registry import IN_VERIFIER, ProposerMethod
from slipstream.speculation.frame import Frame, check
from verifier_svc.hidden_feed import HiddenFeed, HiddenSubscription
from verifier_svc.session import Session
from verifier_svc.sources.source import Attachment, SourceContext
from verifier_svc.wait_policy.arrival_times import ArrivalTimes
from verifier_svc.wait_policy.draft_threshold import LEVELS

log = logging.getLogger(__name__)

LOOKUP_PASSES = 4
"""Most passes of a lookup before one step; what is left, as of a long prompt, follows before the next one."""
LOOKUP_AHEAD = 1
"""Candidates that a lookup keeps for each that a step may take: the next step's are looked up after this one."""
MODEL_AHEAD = 2
"""Candidates that a draft model keeps for each that a step may take: it goes on while a step runs. More of them take
the time of cores that the target shares, and are seldom on the path that it takes."""
PASS_NODES = 64
"""Nodes of all sessions expanded in one pass, at least one of each."""
CALL_S = 0.004
"""Seconds that a call of several levels may take: handing over costs more beside a step, which shares Python's lock."""
PASS_TOKENS = 512
"""Committed tokens that a pass reads; each session's share is at least READ_TOKENS."""
READ_TOKENS = 16
UNLIKELY = 0.001
"""Path probability above which a head's candidates are taken where drafters are sent the lowest threshold: no bytes on
a network are saved here, and a head is often less sure than it is right."""


@dataclass(slots=True, eq=False)
class LocalSession(Attachment):
    """One session on a local proposer."""

    vocabulary_size: int = UNLIMITED
    """The target's."""
    tree: DraftTree = field(init=False)
    """What was proposed, with the nodes that do not pay yet."""
    length: int = field(init=False)
    """Committed tokens that the tree stands on."""
    read_tokens: int = 0
    """Committed tokens that the proposer has read; never all of them."""
    no_room: bool = False
    """Whether the draft model's KV cache had no room for the session."""
    hidden: HiddenSubscription | None = None
    """Set where the method reads the target's hidden states."""
    in_pass: bool = False

    @property
    def readable(self) -> bool:
        """Whether the hidden states that the method needs for a proposal were computed: up to the token before the
        last, which is computed in the next step."""
        return self.hidden is None or self.hidden.end == self.length - 1

    def __post_init__(self) -> None:
        Attachment.__post_init__(self)
        self.length = len(self.session.tokens)
        self.tree = DraftTree(self.length)

    def context(
        self,
        nodes: Sequence[DraftNode],
        expand: Sequence[DraftNode],
        max_read: int,
        deeper: DeeperLevels | None = None,
    ) -> ProposerContext:
        """A snapshot for the proposer: `nodes`, parents before children, and those of them, or the root, to expand."""
        session = self.session
        index = {id(node): number for number, node in enumerate(nodes)}
        drawn = session.sampling.drawn
        return ProposerContext(
            handle=self,
            tokens=session.tokens,
            length=self.length,
            prompt_length=session.prompt_length,
            max_length=session.max_length,
            sampling=session.sampling,
            vocabulary_size=self.vocabulary_size,
            node_tokens=[node.token for node in nodes],
            parents=[index.get(id(node.parent), ROOT) for node in nodes],
            expand=[index.get(id(node), ROOT) for node in expand],
            max_read_tokens=max_read,
            deeper=deeper,
            cache_salt=session.cache_salt,
            tenant=session.tenant,
            prediction=session.prediction,
            structured_output=session.structure,
            noise_stream=self.tree.noise_stream(session.sampling.seed, self.number, session.epoch) if drawn else 0,
            noise_nodes=[node.number for node in expand],
            hidden=self.hidden.take() if self.hidden is not None else (),
        )


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """One session's part of one pass."""

    attachment: LocalSession
    context: ProposerContext
    places: list[DraftNode]
    """The root, then the context's nodes: what a proposal's parent indices stand for."""


class LocalSource:
    """One proposer and the sessions that have it. Without a `thread` it runs in `collect`, on the event loop."""

    def __init__(
        self,
        method: ProposerMethod,
        opened: OpenedProposer,
        context: SourceContext,
        thread: ModelThread | None,
        feed: HiddenFeed | None,
        expand: int = FEWEST,
    ) -> None:
        """`feed`: there for a method that reads hidden states. `expand`: nodes of a session expanded in one pass."""
        self.address = IN_VERIFIER + method.name
        self.arrival_times = ArrivalTimes()
        self._method = method
        self._proposer = opened.proposer
        self._max_length = opened.model.max_length
        self._depth = min(DEEPEST, opened.depth)
        self._need, self._feed = opened.hidden, feed
        self._open_window = opened.open_window
        self._context = context
        self._thread = thread
        self._expand = expand
        # What hidden states are worth is known for one root: nothing is proposed ahead of the next.
        self._ahead = LOOKUP_AHEAD if thread is None or opened.hidden is not None else MODEL_AHEAD
        self._sessions: dict[Session, LocalSession] = {}
        self._pending: dict[LocalSession, None] = {}
        """Sessions whose trees may have to grow."""
        self._closing: list[LocalSession] = []
        self._work = asyncio.Event()
        self._level_budget = LevelBudget(CALL_S)
        self.passes = 0
        """Calls of the proposer."""

    @property
    def up(self) -> bool:
        return True

    async def run(self) -> None:
        while self._thread is not None:
            await self._work.wait()
            requests, closing = self._schedule(), self._take_closing()
            if not requests and not closing:
                self._work.clear()
                continue
            began = self._context.clock()
            answers = await self._thread.run(self._propose, requests, closing)
            if all(request.context.expand for request in requests):
                self._level_budget.observe(self._context.clock() - began, answers)
            arrived = [self._deliver(request, answer, began) for request, answer in zip(requests, answers, strict=True)]
            if any(arrived):
                self._context.candidates_arrived()

    def open(self, session: Session, name: str) -> None:
        known = self._sessions.get(session)
        if known is not None:
            if known.name != name:
                known.name = name
                session.name_source(known.number, name)
            return
        number, now, size = next(self._context.numbers), self._context.clock(), self._context.target.vocabulary_size
        attachment = LocalSession(session, self.arrival_times, name, number, now, vocabulary_size=size)
        try:
            self._check(session)
        except SlipstreamError as error:
            self._give_up(attachment, error)
            return
        session.name_source(attachment.number, name)
        self._sessions[session] = attachment
        if self._feed is not None and self._need is not None:
            attachment.hidden = self._feed.subscribe(session, self._need)
        if self._open_window is not None and session.served:
            session.window = self._open_window(attachment, session.tokens, session.stop_token_ids)
        self._wake(attachment)

    def close(self, session: Session) -> None:
        attachment = self._sessions.pop(session, None)
        if attachment is None:
            return
        session.tree.forget(attachment.number)
        if self._open_window is not None:
            session.window = None
        if self._feed is not None and attachment.hidden is not None:
            self._feed.unsubscribe(session, attachment.hidden)
        self._pending.pop(attachment, None)
        self._closing.append(attachment)
        for other in self._sessions.values():
            if other.no_room:
                other.no_room = False
                self._pending[other] = None
        self._work.set()

    def root_moved(self, session: Session) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            attachment.root_moved(self._context.clock(), awaited=self._expected(attachment))
            self._follow(attachment)

    def committed(self, session: Session, base: int, token_ids: list[int]) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:  # a shadow's double, whose root moves only here
            self._follow(attachment)

    def collect(self) -> None:
        if self._thread is not None or not (self._pending or self._closing):
            return
        self._propose([], self._take_closing())
        for _ in range(LOOKUP_PASSES if self._pending else 0):
            for request in self._schedule():  # one call for each: what it raises costs one session its source
                began = self._context.clock()
                [answer] = self._propose([request], [])
                self._deliver(request, answer, began)

    @property
    def once_a_round(self) -> bool:
        return self._need is not None

    def awaited(self, session: Session) -> Attachment | None:
        attachment = self._sessions.get(session)
        return attachment if attachment is not None and self._expected(attachment) else None

    def threshold_changed(self, session: Session) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            self._graft(attachment)
            self._wake(attachment)

    def quarantine(self, session: Session, error: SlipstreamError) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            self.close(session)
            self._give_up(attachment, error)

    def _check(self, session: Session) -> None:
        """Raises FailedPrecondition or ResourceExhausted for a session that the method cannot serve."""
        if session.sampling.drawn and not self._method.gives_distribution:
            raise FailedPrecondition(
                f"drafter {self._method.name} draws nothing, as the rule {session.sampling.acceptance!r} needs it; "
                "use the coupled rule, which accepts as much of its candidates.",
                reason="NO_DISTRIBUTION",
            )
        if self._need is not None and not session.served:
            raise FailedPrecondition(
                f"drafter {self._method.name} reads hidden states, which a shadow has none of; let it serve.",
                reason="HIDDEN_STATES_MISSING",
            )
        if len(session.tokens) >= self._max_length:
            raise ResourceExhausted(f"the draft model holds {self._max_length} tokens; decode without it.")

    def _give_up(self, attachment: LocalSession, error: SlipstreamError) -> None:
        self._context.give_up(attachment.session, self)
        attachment.report_given_up(error)

    def _expected(self, attachment: LocalSession) -> bool:
        """Whether a step may wait for candidates of the proposer."""
        session = attachment.session
        short = len(session.tokens) < self._max_length and not attachment.no_room
        if self._need is not None:  # one proposal for each root, and none before the target's first pass
            coming = attachment.in_pass or (attachment in self._pending and attachment.readable)
            return coming and self._context.wanted and session.max_draft_tokens > 0 and short
        return self._thread is not None and self._context.wanted and session.max_draft_tokens > 0 and short

    def _wake(self, attachment: LocalSession) -> None:
        self._pending[attachment] = None
        self._work.set()

    def _follow(self, attachment: LocalSession) -> None:
        """Moves the proposed tree's root to the session's last committed token."""
        fresh = attachment.session.tokens[attachment.length :]
        if fresh:
            attachment.length += len(fresh)
            attachment.no_room = False
            if self._need is None or attachment.session.sampling.drawn:
                attachment.tree.commit(fresh)
                self._graft(attachment)
            else:
                self._start_again(attachment)
            self._wake(attachment)

    def _start_again(self, attachment: LocalSession) -> None:
        """Drops what is left of the proposed tree: newer hidden states know more of what follows, and with old
        candidates in its session's tree a step would not wait for new ones."""
        tree = attachment.tree
        tree.restart(attachment.length)
        self._context.graft(
            attachment.session, Frame(tree.base_length, tree.generation, 1, (), (), source=attachment.number)
        )

    def _take_closing(self) -> list[LocalSession]:
        closing, self._closing = self._closing, []
        return closing

    def _schedule(self) -> list[LocalRequest]:
        """A part of the next pass for each session whose tree has to grow."""
        pending = list(self._pending)
        share = max(READ_TOKENS, PASS_TOKENS // max(1, len(pending)))
        expand = min(self._expand, max(1, PASS_NODES // max(1, len(pending))))
        requests = []
        for attachment in pending:
            request = self._request(attachment, expand, share)
            if request is None:
                del self._pending[attachment]
            else:
                requests.append(request)
        return requests

    def _request(self, attachment: LocalSession, expand: int, share: int) -> LocalRequest | None:
        session, tree = attachment.session, attachment.tree
        room = self._most_nodes(session) - tree.sent_count
        if room <= 0 or attachment.no_room or not attachment.readable:
            return None
        depth = min(self._depth, min(session.max_length, self._max_length) - attachment.length)
        starts = tree.frontier(min(expand, room), self._least_log_prob, depth)
        if not starts:
            return None
        unread = attachment.length - attachment.read_tokens
        if unread > share:
            return LocalRequest(attachment, attachment.context([], [], share), [])
        nodes = tree.above(starts)
        for node in starts:
            node.expanded = True
        # A head's levels end where its candidates are not worth their rows in a pass of the target.
        levels = self._level_budget.levels if self._need is None else depth
        levels = 1 if session.sampling.drawn else levels
        # A proposer that closed the sequence for others has to read it again: as a prompt, not at once.
        deeper = tree.deeper(starts, expand, levels, self._least_log_prob, depth)
        context = attachment.context(nodes, starts, max(unread, READ_TOKENS), deeper)
        attachment.in_pass = True
        return LocalRequest(attachment, context, [tree.root, *nodes])

    def _most_nodes(self, session: Session) -> int:
        return self._ahead * session.max_draft_tokens if self._context.wanted else 0

    @property
    def _least_log_prob(self) -> float:
        threshold = self._context.threshold
        if self._need is not None and threshold <= LEVELS[0]:
            threshold = min(threshold, UNLIKELY)
        return math.log(max(threshold, NEVER))

    def _propose(
        self, requests: list[LocalRequest], closing: list[LocalSession]
    ) -> Sequence[Proposal | SlipstreamError]:
        """Runs on the proposer's thread."""
        for attachment in closing:
            self._proposer.close_sequence(attachment)
        if not requests:
            return []
        self.passes += 1
        try:
            return self._proposer.propose([request.context for request in requests])
        except Exception as error:
            log.error("the local drafter %s failed", self._method.name, exc_info=error)
            return [Internal("the local drafter failed in this session's pass.") for _ in requests]

    def _deliver(self, request: LocalRequest, answer: Proposal | SlipstreamError, began: float) -> bool:
        """Whether a step may take candidates that were not there before. `began`: when the pass did."""
        attachment, session = request.attachment, request.attachment.session
        attachment.in_pass = False
        if self._sessions.get(session) is not attachment:
            return False
        if isinstance(answer, SlipstreamError):
            self.quarantine(session, answer)
            return session.served
        attachment.read_tokens = min(answer.read_tokens, request.context.length - 1)
        attachment.no_room = answer.no_room
        if answer.read_tokens < request.context.length:
            for node in request.context.expand:
                attachment.tree.reopen(request.places[1 + node])
        sent, ended = attachment.tree.sent_count, self._context.clock()
        self._join(request, answer)
        arrived = self._graft(attachment)
        for observer in self._context.observers:
            observer.local_pass_ended(session, attachment.number, attachment.tree.sent_count - sent, began, ended)
        return arrived

    def _join(self, request: LocalRequest, answer: Proposal) -> None:
        """Adds what was proposed to the proposed tree."""
        attachment = request.attachment
        if not attachment.session.sampling.drawn:
            joined = attachment.tree.join(request.places, answer.nodes)
            if self._need is not None:  # it proposed the whole tree
                for proposed in joined:
                    proposed.expanded = True
        else:
            attachment.tree.join_drawn(request.places, answer.nodes, self._most_nodes(attachment.session))

    def _graft(self, attachment: LocalSession) -> bool:
        """Adds proposed nodes that pay to the session's tree. Whether a step may take any that were not there."""
        session, tree = attachment.session, attachment.tree
        if not session.sampling.drawn:
            for node in tree.worth_sending(self._most_nodes(session), self._least_log_prob):
                tree.mark_sent(node)
        nodes = tree.take_sent()
        if not nodes:
            return False
        distributions = tuple(node.distribution for node in nodes)
        frame = Frame(
            base_length=tree.base_length,
            generation=tree.generation,
            first_node=nodes[0].number,
            token_ids=tuple(node.token for node in nodes),
            log_probs=tuple(node.log_prob for node in nodes),
            parents=tuple(node.parent.number if node.parent is not None else 0 for node in nodes),
            distributions=distributions if any(distributions) else (),
            source=attachment.number,
        )
        try:
            checked = check(frame, self._context.target.vocabulary_size, session.tree.limits)
            added = self._context.graft(session, checked)
        except SlipstreamError as error:
            self._context.dropped["invalid"] += len(nodes)
            self.quarantine(session, error)
            return session.served
        if not added or not session.served:  # no step waits for a shadow
            return False
        attachment.candidates_came(self._context.clock())
        return True
