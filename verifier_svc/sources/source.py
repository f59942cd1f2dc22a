"""One session on one drafter, as the verifier sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from slipstream.errors import LINK_LOST, SlipstreamError
from slipstream.rpc import proto_conversion
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.session import Session
from verifier_svc.sources.flow_control import WorkAllowance
from verifier_svc.wait_policy.arrival_times import ArrivalTimes, DelayDistribution


@dataclass(slots=True, eq=False)
class Attachment:
    """Each open gets a number of its own, which is its source in the session's tree too, so that frames sent before it,
    which stand on something else, name nothing."""

    session: Session
    pace: ArrivalTimes
    name: str
    """What the session's gateway calls the drafter; another gateway may call it otherwise."""
    number: int
    since: float
    """Monotonic seconds: when the drafter was told something, or its last candidates came."""
    fresh: bool = True
    """Whether nothing came yet since the drafter's tree was left."""
    reopens: int = 0
    """How often the drafter said that it missed a commit."""
    opened: float = 0.0
    """Monotonic seconds."""
    owed: float = -math.inf
    """Since when the drafter owes the session a step, unless it gave a sign of life later."""
    told: bool = False
    """Whether the gateway knows that there is no link."""
    nodes: int = 0
    """That its latest policy allows; 0 while it is to pause."""
    allowance: WorkAllowance = field(default_factory=WorkAllowance)
    delays: DelayDistribution = field(init=False)
    """Of what is awaited now."""

    def __post_init__(self) -> None:
        self.delays = self.pace.first

    def asked(self, now: float, *, answering: bool) -> None:
        """The drafter was told of a commit; with its tree left or used up, candidates on the new root are to come.
        `answering`: it was to send some until now."""
        if answering:
            self.delays.missed(now - self.since)
        self.fresh = self.fresh or self.session.tree.empty
        self._await(now)

    def arrived(self, now: float) -> None:
        """Candidates came."""
        self.delays.came(now - self.since)
        self.fresh = False
        self._await(now)

    def _await(self, now: float) -> None:
        self.since = now
        if self.fresh:
            self.delays = self.pace.first
        else:
            enough = self.session.tree.holds(self.session.max_draft_tokens)
            self.delays = self.pace.enough if enough else self.pace.few

    def attached(self) -> None:
        """Tells the gateway that the drafter works for the session."""
        self._tell(None)

    def unlinked(self, error: SlipstreamError) -> None:
        """Tells it that there is no link for now."""
        self.told = True
        failure = proto_conversion.failure_to_wire(error)
        failure.reason = LINK_LOST
        self._tell(failure)

    def given_up(self, error: SlipstreamError) -> None:
        """Tells it that the drafter is not asked again, unless it is attached again."""
        self._tell(proto_conversion.failure_to_wire(error))

    def _tell(self, failure: types_pb2.Failure | None) -> None:
        tell(self.session, self.name, failure)


def tell(session: Session, drafter: str, failure: types_pb2.Failure | None) -> None:
    """Tells the session's gateway that a drafter fails it, or (None) works for it."""
    session.say(
        verifier_pb2.DrafterEvent(session=session.number, epoch=session.epoch, drafter=drafter, failure=failure)
    )
