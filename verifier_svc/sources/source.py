"""The interface of a source of candidates, and what the verifier keeps for each session that a source serves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.errors import LINK_LOST, SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import Dial
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.speculation.frame import Frame
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver
from verifier_svc.session import DraftedSession
from verifier_svc.wait_policy.arrival_times import ArrivalTimes, DelayDistribution
from verifier_svc.wait_policy.draft_threshold import PAUSE


class CandidateSource(Protocol):
    """A remote drafter or a local proposer. It grafts candidates on the trees of its sessions; no call blocks, and none
    raises for what the source itself does wrong: that costs a session its source, and the gateway is informed."""

    address: str
    """Name by which gateways know it: HOST:PORT, or `verifier:NAME` for a local proposer."""

    @property
    def up(self) -> bool:
        """True while the source can send candidates."""
        ...

    async def run(self) -> None:
        """Keeps the source working until it is cancelled."""
        ...

    def open(self, session: DraftedSession, name: str) -> None:
        """Propose for the session from now on, under the name that its gateway gives to this source."""
        ...

    def close(self, session: DraftedSession) -> None:
        """Stop proposing for the session; candidates that only this source proposed leave its tree."""
        ...

    def root_moved(self, session: DraftedSession) -> None:
        """The session's root moved; `committed` follows while the next step runs."""
        ...

    def committed(self, session: DraftedSession, base: int, token_ids: list[int]) -> None:
        """`token_ids` were committed after `base` tokens."""
        ...

    def collect(self) -> None:
        """A step is about to be planned: candidates that can be had at once join the trees now."""
        ...

    def awaited(self, session: DraftedSession) -> Attachment | None:
        """The attachment whose candidates are on their way; None when none are expected."""
        ...

    @property
    def once_a_round(self) -> bool:
        """Whether all its candidates for a round come in one proposal, which begins when a step is held back for it."""
        ...

    def step_held(self, session: DraftedSession) -> None:
        """The session's next step is held back: a source that proposes once a round begins."""
        ...

    def policy_changed(self, session: DraftedSession) -> None:
        """Candidates need another path probability now, or are wanted no more or again (`SourceContext.wants`)."""
        ...

    def quarantine(self, session: DraftedSession, error: SlipstreamError) -> None:
        """Take no more candidates of this source for the session, until its gateway attaches it again."""
        ...


@dataclass(slots=True)
class SourceContext:
    """State that all sources of one verifier share."""

    target: types_pb2.ModelInfo
    threshold: float
    """Path probability that candidates must have; `PAUSE`: none are wanted."""
    detach: Callable[[DraftedSession, CandidateSource], None]
    """The source is not asked again for the session."""
    clock: Callable[[], float]
    silence_s: float
    """Seconds without a sign of life after which a drafter that owes a step is detached."""
    dial: Dial
    candidates_arrived: Callable[[], None] = lambda: None
    """Called when candidates came that a step may take."""
    traffic: ByteCounter = field(default_factory=ByteCounter)
    session_rate: float = 0.0
    """Tokens that a session commits a second lately."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Candidates that came and were not taken, by reason."""
    observer: StepObserver = field(default_factory=StepObserver)
    annotator: MessageAnnotator = field(default_factory=MessageAnnotator)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers for attachments, none of which is used twice."""

    def wants(self, session: DraftedSession) -> bool:
        """Whether any candidate of the session pays for its place in a step now."""
        return self.threshold < PAUSE and session.drafting

    def graft(self, session: DraftedSession, frame: Frame) -> int:
        """Adds a checked frame to the session's tree; returns how many candidates it brought, new ones or agreement
        with another source's."""
        grafted = session.tree.graft(frame)
        if grafted.dropped and session.served:
            self.dropped.update(grafted.dropped)
        return grafted.added + grafted.merged


@dataclass(slots=True, eq=False)
class Attachment:
    """One session on one source. Each `open` gets a number of its own, which names the source in the session's tree, so
    that late frames of an earlier attachment, which stand on another prefix, name nothing."""

    session: DraftedSession
    arrival_times: ArrivalTimes
    name: str
    """The gateway's name of the source; another gateway may use another one."""
    number: int
    since: float
    """Monotonic seconds at which the last commit was sent to the source, or its last candidates came."""
    fresh: bool = True
    """Whether no candidates came since the source's tree was left."""
    delays: DelayDistribution = field(init=False)
    """Delay distribution of the candidates that are awaited now."""

    def __post_init__(self) -> None:
        self.delays = self.arrival_times.first

    def root_moved(self, now: float, *, awaited: bool) -> None:
        """A commit goes to the source; with its tree left or used up, candidates on the new root are to come.
        `awaited`: candidates were expected until now."""
        if awaited:
            self.delays.missed(now - self.since)
        self.fresh = self.fresh or not self.session.tree.holds(1, self.number)
        self._await_next(now)

    def candidates_came(self, now: float) -> None:
        """Candidates of the source joined the session's tree."""
        self.delays.came(now - self.since)
        self.fresh = False
        self._await_next(now)

    def _await_next(self, now: float) -> None:
        self.since = now
        if self.fresh:
            self.delays = self.arrival_times.first
        else:
            enough = self.session.tree.holds(self.session.request.max_draft_tokens, self.number)
            self.delays = self.arrival_times.enough if enough else self.arrival_times.few

    def report_working(self) -> None:
        """Informs the gateway that the source works for the session."""
        report(self.session, self.name, None)

    def report_unlinked(self, error: SlipstreamError) -> None:
        """Informs the gateway that the source is out of reach for now."""
        failure = proto_conversion.failure_to_proto(error)
        failure.reason = LINK_LOST
        report(self.session, self.name, failure)

    def report_given_up(self, error: SlipstreamError) -> None:
        """Informs the gateway that the source is not used again, unless the gateway attaches it again."""
        report(self.session, self.name, proto_conversion.failure_to_proto(error))


def report(session: DraftedSession, drafter: str, failure: types_pb2.Failure | None) -> None:
    """Sends the session's gateway an event: the drafter failed, or (None) works."""
    session.request.stream.send(
        verifier_pb2.DrafterEvent(
            session=session.request.number, epoch=session.request.epoch, drafter=drafter, failure=failure
        )
    )
