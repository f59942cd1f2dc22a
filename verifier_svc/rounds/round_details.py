"""Details of rounds for sessions with `round_details`: the drafters of each accepted candidate, and their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.rpc.proto_conversion import microseconds
from slipstream.speculation.selection import ROOT
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.rounds.observer import MessageAnnotator, StepObserver
from verifier_svc.rounds.round_result import RoundResult
from verifier_svc.session import DraftedSession, Session

MOST_SPANS = 64
"""Most spans of drafting in one round."""


@dataclass(slots=True)
class DraftTime:
    """Monotonic seconds of one answer of a drafter, and its candidates."""

    source: int
    began: float
    ended: float
    candidates: int = 0


class DraftTimes:
    """When the drafters of one session worked, since its last round."""

    def __init__(self) -> None:
        self._running: dict[int, DraftTime] = {}
        """By source."""
        self._done: list[DraftTime] = []

    def begin(self, source: int, now: float) -> None:
        """The drafter was sent a new root, which ends its candidates for the former one."""
        before = self._running.pop(source, None)
        if before is not None:
            self.add(before)
        if len(self._running) < MOST_SPANS:
            self._running[source] = DraftTime(source, now, now)

    def receive(self, source: int, candidates: int, now: float) -> None:
        if running := self._running.get(source):
            running.ended = now
            running.candidates += candidates

    def add(self, time: DraftTime) -> None:
        """Adds a finished piece of a drafter's work."""
        if time.candidates and len(self._done) < MOST_SPANS:
            self._done.append(time)

    def take(self, until: float) -> Iterator[DraftTime]:
        """Removes and yields the pieces that ended by then. The rest belongs to a later round."""
        done = [time for time in self._done if time.ended <= until]
        self._done = [time for time in self._done if time.ended > until]
        yield from done


class RoundDetailObserver(StepObserver, MessageAnnotator):
    """Adds details to the rounds of sessions whose Open has `round_details`."""

    def __init__(self) -> None:
        self._times: dict[DraftedSession, DraftTimes] = {}

    def session_opened(self, session: Session, request: verifier_pb2.DecodeOpen) -> None:
        if request.round_details:
            self._times[session] = DraftTimes()

    def session_ended(self, session: Session) -> None:
        self._times.pop(session, None)

    def drafter_informed(self, session: DraftedSession, source: int, length: int, now: float) -> None:
        if times := self._times.get(session):
            times.begin(source, now)

    def candidates_received(
        self, session: DraftedSession, source: int, candidates: types_pb2.Candidates, now: float
    ) -> None:
        if times := self._times.get(session):
            times.receive(source, len(candidates.token_ids), now)

    def local_pass_ended(
        self, session: DraftedSession, source: int, candidates: int, began: float, ended: float
    ) -> None:
        if times := self._times.get(session):
            times.add(DraftTime(source, began, ended, candidates))

    def annotate_round(self, result: RoundResult, message: verifier_pb2.Round) -> None:
        times = self._times.get(result.scheduled.session)
        if times is None:
            return
        session, ended = result.scheduled.session, result.timing.ended
        add_origins(result, message)
        for time in times.take(ended):
            message.drafts.add(
                drafter="+".join(session.drafters_of((time.source,))),
                began_us=microseconds(ended - time.began),
                ended_us=microseconds(ended - time.ended),
                candidates=time.candidates,
            )


def add_origins(result: RoundResult, message: verifier_pb2.Round) -> None:
    """Record the drafters of each accepted candidate, and whether the last token is a bonus token."""
    session, selection, path = result.scheduled.session, result.scheduled.selection, result.result.path
    shares = {share.drafter: share for share in message.drafters}
    for place, node in enumerate(path[: result.accepted]):
        for name in session.drafters_of(selection.sources[node]):
            shares[name].accepted_places.append(place)
    complete = len(result.token_ids) > len(path)
    message.bonus = bool(len(selection)) and complete and selection.first_child(path[-1] if path else ROOT) is None
