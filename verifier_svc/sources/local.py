"""Proposers that run inside the verifier, as a source of candidates: no network, no second process.

A lookup takes microseconds, so it runs on the event loop right before a step is planned: its candidates are always
there, and no step waits for them. A draft model takes milliseconds, so it runs ahead of the verifier on a thread of its
own, in one packed pass for all sessions at a time, and the wait policy decides how long a step waits for it, as for a
remote drafter. Candidates join the sessions' trees through the same checks and under the same labels as remote ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from slipstream.engine.model_thread import ModelThread
from slipstream.errors import FailedPrecondition, ResourceExhausted, SlipstreamError
from slipstream.proposers.base import UNLIMITED, OpenedProposer
from slipstream.proposers.draft_tree import DEEPEST, DraftNode
from slipstream.proposers.drafting.scheduler import DraftScheduler, Subscriber
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession, DraftSessionObserver
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.proposers.expansion import FEWEST
from slipstream.proposers.registry import IN_VERIFIER, ProposerMethod
from slipstream.speculation.frame import check
from verifier_svc.hidden_feed import HiddenFeed, HiddenSubscription
from verifier_svc.session import DraftedSession, Session
from verifier_svc.sources.source import Attachment, SourceContext
from verifier_svc.wait_policy.arrival_times import ArrivalTimes
from verifier_svc.wait_policy.draft_threshold import LEVELS

LOOKUP_PASSES = 4
"""Most passes of a lookup before one step; what is left, as of a long prompt, follows before the next one."""
LOOKUP_AHEAD = 1
"""Candidates that a lookup keeps for each that a step may take: the next step's are looked up after this one."""
MODEL_AHEAD = 2
"""Candidates that a draft model keeps for each that a step may take: it goes on while a step runs. More of them take
the time of cores that the target shares, and are seldom on the path that it takes. For the same reason nothing is
prepared on paths that do not pay yet."""
CALL_S = 0.004
"""Seconds that a call of several levels may take: handing over costs more beside a step, which shares Python's lock."""
PROMPT_TOKENS = 512
"""Committed tokens of prompts that a pass reads."""
UNLIKELY = 0.001
"""Path probability above which a head's candidates are taken where drafters are sent the lowest threshold: no bytes on
a network are saved here, and a head is often less sure than it is right."""


@dataclass(slots=True, eq=False)
class LocalSession(Attachment):
    """One session on a local proposer."""

    drafting: DraftSession = field(kw_only=True)
    hidden: HiddenSubscription | None = None
    """Set where the method reads the target's hidden states."""


@dataclass(frozen=True, slots=True)
class PassReporter(DraftSessionObserver):
    """Reports a session's passes to the verifier's observers."""

    attachment: LocalSession
    context: SourceContext

    def step_ended(self, began_s: float, ended_s: float, proposed: int, sent: int) -> None:
        if not sent and self.attachment.drafting.has_proposed_whole:
            self.attachment.delays.missed(self.context.clock() - self.attachment.since)
            self.context.candidates_arrived()
        session, number = self.attachment.session, self.attachment.number
        self.context.observer.local_pass_ended(session, number, sent, began_s, ended_s)


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
        self.arrival_times = ArrivalTimes() if opened.hidden is None else ArrivalTimes.on_request()
        self._method, self._opened = method, opened
        self._max_length = opened.model.max_length
        self._need, self._feed = opened.hidden, feed
        self._context = context
        self._thread = thread
        # What hidden states are worth is known for one root: nothing is proposed ahead of the next.
        self._ahead = LOOKUP_AHEAD if thread is None or opened.hidden is not None else MODEL_AHEAD
        self._sessions: dict[DraftedSession, LocalSession] = {}
        limits = DraftStepLimits(UNLIMITED, expand, PROMPT_TOKENS)
        call_s = CALL_S if thread is not None else 0.0  # a lookup goes down as far as it can by itself
        self._drafting = DraftScheduler(opened.proposer, limits, context.clock, call_s)

    @property
    def up(self) -> bool:
        return True

    async def run(self) -> None:
        if self._thread is not None:
            await self._drafting.run(self._thread)

    def open(self, session: DraftedSession, name: str) -> None:
        known = self._sessions.get(session)
        if known is not None:
            if known.name != name:
                known.name = name
                session.name_source(known.number, name)
            return
        attachment = self._attach(session, name)
        try:
            self._check(session)
        except SlipstreamError as error:
            self._detach(attachment, error)
            return
        session.name_source(attachment.number, name)
        self._sessions[session] = attachment
        if self._feed is not None and self._need is not None:
            attachment.hidden = attachment.drafting.hidden = self._feed.subscribe(session, self._need)
        if self._opened.open_window is not None and isinstance(session, Session):
            session.window = self._opened.open_window(
                attachment.drafting, session.tokens, session.request.stop_token_ids
            )
        fail = partial(self._fail, attachment)
        self._drafting.add_session(Subscriber(attachment.drafting, partial(self._graft, attachment), fail))

    def close(self, session: DraftedSession) -> None:
        attachment = self._sessions.pop(session, None)
        if attachment is None:
            return
        session.tree.forget(attachment.number)
        if self._opened.open_window is not None and isinstance(session, Session):
            session.window = None
        if self._feed is not None and attachment.hidden is not None:
            self._feed.unsubscribe(session, attachment.hidden)
        self._drafting.remove_session(attachment.drafting)

    def root_moved(self, session: DraftedSession) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            if self._thread is not None:  # else nothing is awaited
                requested = attachment.drafting.requested
                if not requested:
                    attachment.delays.passed_over()
                attachment.root_moved(self._context.clock(), awaited=requested and self._expected(attachment))
            self._follow(attachment)

    def committed(self, session: DraftedSession, base: int, token_ids: list[int]) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:  # a shadow's double, whose root moves only here
            self._follow(attachment)

    def collect(self) -> None:
        if self._thread is None:
            self._drafting.step_each(LOOKUP_PASSES)

    @property
    def once_a_round(self) -> bool:
        return self._need is not None

    def step_held(self, session: DraftedSession) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None and not attachment.drafting.requested:
            attachment.since = self._context.clock()
            attachment.drafting.requested = True
            self._drafting.session_changed(attachment.drafting)

    def awaited(self, session: DraftedSession) -> Attachment | None:
        attachment = self._sessions.get(session)
        return attachment if attachment is not None and self._expected(attachment) else None

    def policy_changed(self, session: DraftedSession) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            attachment.drafting.policy = self._policy(session)
            self._drafting.session_changed(attachment.drafting)

    def quarantine(self, session: DraftedSession, error: SlipstreamError) -> None:
        attachment = self._sessions.get(session)
        if attachment is not None:
            self.close(session)
            self._detach(attachment, error)

    def _attach(self, session: DraftedSession, name: str) -> LocalSession:
        number, context = next(self._context.numbers), self._context
        drafting = DraftSession(
            epoch=session.request.epoch,
            sampling=session.request.sampling,
            policy=self._policy(session),
            tokens=list(session.tokens),
            prompt_length=session.request.prompt_length,
            max_length=min(session.request.max_length, self._max_length),
            vocabulary_size=context.target.vocabulary_size,
            prediction=session.request.prediction,
            cache_salt=session.request.cache_salt,
            tenant=session.request.tenant,
            structure=session.request.structure,
            id=session.request.id,
            number=number,
            max_depth=min(DEEPEST, self._opened.depth),
            prepared=1.0,
            together_s=0.0,
            level_price=self._level_price,
            requested=self._need is None,
        )
        attachment = LocalSession(session, self.arrival_times, name, number, context.clock(), drafting=drafting)
        drafting.observer = PassReporter(attachment, context)
        return attachment

    def _policy(self, session: DraftedSession) -> DraftPolicy:
        threshold = self._context.threshold
        if self._need is not None and threshold <= LEVELS[0]:
            threshold = min(threshold, UNLIKELY)
        return DraftPolicy(
            self._ahead * session.request.max_draft_tokens if self._context.wants(session) else 0, threshold
        )

    def _level_price(self) -> float:
        """Tokens that a session would commit in the time that a level takes, while the verifier waits for it; 1, which
        no level gains, before any was timed."""
        level_s = self._drafting.level_s
        return self._context.session_rate * level_s if level_s else 1.0

    def _check(self, session: DraftedSession) -> None:
        """Raises FailedPrecondition or ResourceExhausted for a session that the method cannot serve."""
        sampling = session.request.sampling
        if sampling.drawn and not self._method.gives_distribution:
            raise FailedPrecondition(
                f"drafter {self._method.name} samples from no distribution, which the rule "
                f"{sampling.acceptance!r} needs; use the coupled rule, which accepts as much of its candidates.",
                reason="NO_DISTRIBUTION",
            )
        if self._need is not None and not session.served:
            raise FailedPrecondition(
                f"drafter {self._method.name} reads hidden states, which a shadow has none of; let it serve.",
                reason="HIDDEN_STATES_MISSING",
            )
        if len(session.tokens) >= self._max_length:
            raise ResourceExhausted(f"the draft model holds {self._max_length} tokens; decode without it.")

    def _detach(self, attachment: LocalSession, error: SlipstreamError) -> None:
        self._context.detach(attachment.session, self)
        attachment.report_given_up(error)

    def _expected(self, attachment: LocalSession) -> bool:
        """Whether a step may wait for candidates of the proposer."""
        session, drafting = attachment.session, attachment.drafting
        if not self._context.wants(session) or not session.request.max_draft_tokens or drafting.no_room:
            return False
        if len(session.tokens) >= self._max_length:
            return False
        if self._need is not None:  # one proposal for each root, and none before the target's first pass
            return drafting.in_step or drafting.can_propose
        return self._thread is not None

    def _follow(self, attachment: LocalSession) -> None:
        """Moves the proposed tree's root to the session's last committed token."""
        drafting, length = attachment.drafting, len(attachment.drafting.tokens)
        fresh = attachment.session.tokens[length:]
        if fresh:
            drafting.commit(length, fresh)
            drafting.requested = self._need is None
            if drafting.proposes_whole_trees:
                self._graft(attachment, [])  # drops what is left of the old one
            if drafting.requested:
                self._drafting.session_changed(drafting)

    def _fail(self, attachment: LocalSession, error: SlipstreamError) -> None:
        self.quarantine(attachment.session, error)
        if attachment.session.served:
            self._context.candidates_arrived()

    def _graft(self, attachment: LocalSession, nodes: list[DraftNode]) -> None:
        """Adds proposed nodes that pay to the session's tree."""
        session = attachment.session
        frame = attachment.drafting.tree.frame(nodes, attachment.number)
        try:
            checked = check(frame, self._context.target.vocabulary_size, session.tree.limits)
            added = self._context.graft(session, checked)
        except SlipstreamError as error:
            self._context.dropped["invalid"] += len(nodes)
            self._fail(attachment, error)
            return
        if added and session.served and self._thread is not None:  # no step waits for a shadow, or for a lookup
            attachment.candidates_came(self._context.clock())
            self._context.candidates_arrived()
