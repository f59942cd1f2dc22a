"""The interfaces by which tracing, metrics and shadow drafters watch the verifier, which imports none of them.

The scheduler, the service and the drafters' links call an observer at the moments below; it changes nothing. What is
measured beside a session and belongs into its messages, an annotator adds to them before they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.rounds.round_result import RoundResult, StepTiming
from verifier_svc.session import DraftedSession, Session


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step in which no session failed."""

    number: int
    """Counts the verifier's steps."""
    step: list[ScheduledSequence]
    timing: StepTiming
    rejected_s: float
    """Seconds of the step that its rejected candidates took."""


class StepObserver:
    """Watches one verifier, on its event loop. Every method does nothing; observers override those they need."""

    def session_opened(self, session: Session, request: verifier_pb2.DecodeOpen) -> None:
        """A session was accepted and is not yet open on any drafter."""

    def session_closed(self, session: Session, length: int) -> None:
        """The gateway closed the session, of which it has received `length` tokens; 0: unknown."""

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

    def round_reported(self, result: RoundResult) -> None:
        """The round is about to be sent to the session's gateway. Called while the next step runs."""

    def drafter_informed(self, session: DraftedSession, source: int, length: int, now: float) -> None:
        """An open or a commit is sent to a drafter, which then has the session's first `length` tokens."""

    def candidates_received(
        self, session: DraftedSession, source: int, candidates: types_pb2.Candidates, now: float
    ) -> None:
        """A drafter's candidates were added to the session's tree."""

    def local_pass_ended(
        self, session: DraftedSession, source: int, candidates: int, began: float, ended: float
    ) -> None:
        """A drafter inside the verifier proposed so many candidates, between these monotonic seconds."""


class MessageAnnotator:
    """Adds to messages of one verifier what their receivers' users asked for beyond tokens: traces, details of rounds,
    shadows' scores. Every method does nothing; annotators override those they need."""

    def annotate_round(self, result: RoundResult, message: verifier_pb2.Round) -> None:
        """`message` is sent to the session's gateway next, after `StepObserver.round_reported`."""

    def annotate_open(self, session: DraftedSession, drafter: str, request: drafter_pb2.DraftOpen) -> None:
        """`request` is sent next to the drafter that the gateway named `drafter`."""

    def annotate_commit(self, session: DraftedSession, commit: drafter_pb2.DraftCommit) -> None:
        """`commit` is sent to a drafter next."""
