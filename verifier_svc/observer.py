"""The interface by which tracing, metrics and shadow drafters watch the verifier, which imports none of them.

The scheduler, the service and the drafters' links call an observer at the moments below. An observer changes nothing
that a step depends on; where a moment comes with a message, it may add to it what it measured. `RoundResult` is what a
step decided for one session, and writes the `Round` that its gateway is sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.rpc import proto_conversion
from slipstream.rpc.proto_conversion import microseconds
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.session import Session


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Monotonic seconds of one step, and its size."""

    due: float
    """When it could have started: the step before it ended, or there was work again."""
    started: float
    ended: float
    waited: float
    """Seconds for which the step was held back for candidates."""
    sessions: int
    tokens: int

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def elapsed(self) -> float:
        """Seconds in which nothing but this step was there for the sessions: waits, planning and contention for the
        host's cores included."""
        return self.ended - self.due


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step in which no session failed."""

    number: int
    """Counts the verifier's steps."""
    step: list[ScheduledSequence]
    timing: StepTiming
    rejected_s: float
    """Seconds of the step that its rejected candidates took."""


class RoundResult(NamedTuple):
    """The part of one session in a step that decided tokens for it."""

    scheduled: ScheduledSequence
    result: AcceptanceResult
    token_ids: list[int]
    """Committed tokens."""
    timing: StepTiming
    step_number: int
    miss: verifier_pb2.MissCause
    idle_s: float
    """Seconds between the end of the session's previous round and the start of this step."""

    @property
    def accepted(self) -> int:
        """Candidates that were committed."""
        return min(len(self.result.path), len(self.token_ids))

    def message(self, cost_s: float) -> verifier_pb2.Round:
        """What the session's gateway is sent. cost_s: seconds of the step that count as the session's."""
        scheduled, timing = self.scheduled, self.timing
        return verifier_pb2.Round(
            session=scheduled.session.number,
            epoch=scheduled.session.epoch,
            base_length=scheduled.base,
            token_ids=self.token_ids,
            drafted=len(scheduled.selection),
            accepted=self.accepted,
            wait_us=microseconds(self.idle_s),
            verify_us=microseconds(timing.seconds),
            miss=self.miss,
            bubble_us=microseconds(min(timing.waited, self.idle_s)),
            drafters=self._drafter_shares(),
            logprobs=map(proto_conversion.logprobs_to_proto, self.result.logprobs[: len(self.token_ids)]),
            cost_us=microseconds(cost_s),
            cached_tokens=scheduled.session.found_tokens,
        )

    def _drafter_shares(self) -> list[verifier_pb2.DrafterShare]:
        """In the order of the drafters' first candidates. Candidates of the same sources are counted together."""
        sources, session = self.scheduled.selection.sources, self.scheduled.session
        if not sources:
            return []
        shares: dict[str, verifier_pb2.DrafterShare] = {}
        accepted = Counter([sources[node] for node in self.result.path])
        for some, drafted in Counter(sources).items():
            for name in session.drafters_of(some):
                share = shares.setdefault(name, verifier_pb2.DrafterShare(drafter=name))
                share.drafted += drafted
                share.accepted += accepted[some]
        return list(shares.values())


class StepObserver:
    """Watches one verifier, on its event loop. Every method does nothing; observers override those they need."""

    def session_opened(self, session: Session, request: verifier_pb2.DecodeOpen) -> None:
        """A session was accepted and is not yet open on any drafter."""

    def session_ended(self, session: Session) -> None:
        """Nothing follows for this session: its last round was reported."""

    def step_started(self, step: list[ScheduledSequence], candidate_price: float) -> None:
        """A step is running, in which one more candidate costs as much time as `candidate_price` tokens."""

    def step_ended(self, report: StepReport) -> None:
        """The step was committed. Called while the next one runs, before its rounds are reported."""

    def prefill_advanced(self, scheduled: ScheduledSequence, timing: StepTiming) -> None:
        """A step computed a piece of a prompt, which ends in a later step."""

    def sequence_discarded(self, scheduled: ScheduledSequence, timing: StepTiming, step_number: int) -> None:
        """A session was closed while this step ran; its outcome is dropped."""

    def round_decided(self, result: RoundResult) -> None:
        """The round's tokens are about to be sent to drafters, and `round_reported` follows."""

    def round_reported(self, result: RoundResult, message: verifier_pb2.Round) -> None:
        """`message` is about to be sent to the session's gateway. Called while the next step runs."""

    def drafter_opened(self, session: Session, drafter: str, request: drafter_pb2.DraftOpen) -> None:
        """`request` is about to be sent to the drafter that the gateway named `drafter`."""

    def drafter_informed(
        self, session: Session, source: int, length: int, now: float, commit: drafter_pb2.DraftCommit | None = None
    ) -> None:
        """An open, or this commit, is sent to a drafter, which then has the session's first `length` tokens."""

    def candidates_received(self, session: Session, source: int, candidates: types_pb2.Candidates, now: float) -> None:
        """A drafter's candidates were added to the session's tree."""

    def local_pass_ended(self, session: Session, source: int, candidates: int, began: float, ended: float) -> None:
        """A drafter inside the verifier proposed so many candidates, between these monotonic seconds."""
