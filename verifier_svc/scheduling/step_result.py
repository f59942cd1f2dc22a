"""What a step decided for one session, and what its gateway is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from slipstream.rpc import proto_conversion
from slipstream.speculation.selection import Selection
from slipstream.v1 import verifier_pb2
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.embedded import ScheduledSequence
from verifier_svc.scheduling.planner import StepLoad
from verifier_svc.session import Session


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Of one step, in monotonic seconds."""

    started: float
    ended: float
    waited: float
    """How long it was held back for candidates."""
    load: StepLoad

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class RoundResult(NamedTuple):
    """What a step decided for one session, committed and still to be told."""

    turn: ScheduledSequence
    verdict: AcceptanceResult
    token_ids: list[int]
    timing: StepTiming
    miss: verifier_pb2.MissCause
    idle_s: float
    """Between the session's round before and this step."""

    @property
    def accepted(self) -> int:
        """Candidates that were committed."""
        return min(len(self.verdict.path), len(self.token_ids))

    def message(self) -> verifier_pb2.Round:
        """What its gateway is told of it."""
        session, chosen, verdict = self.turn.session, self.turn.selection, self.verdict
        return verifier_pb2.Round(
            session=session.number,
            epoch=session.epoch,
            base_length=self.turn.base,
            token_ids=self.token_ids,
            drafted=len(chosen),
            accepted=self.accepted,
            wait_us=proto_conversion.microseconds(self.idle_s),
            verify_us=proto_conversion.microseconds(self.timing.seconds),
            miss=self.miss,
            bubble_us=proto_conversion.microseconds(min(self.timing.waited, self.idle_s)),
            drafters=_shares(session, chosen, verdict.path),
            logprobs=map(proto_conversion.logprobs_to_proto, verdict.logprobs[: len(self.token_ids)]),
        )


def _shares(session: Session, chosen: Selection, path: tuple[int, ...]) -> list[verifier_pb2.DrafterShare]:
    shares: dict[str, verifier_pb2.DrafterShare] = {}
    for node, sources in enumerate(chosen.sources):
        for name in session.senders(sources):
            share = shares.setdefault(name, verifier_pb2.DrafterShare(drafter=name))
            share.drafted += 1
            share.accepted += node in path
    return list(shares.values())


def clip(session: Session, token_ids: list[int]) -> tuple[list[int], verifier_pb2.FinishReason | None]:
    """What of a round is committed: nothing after a stop token, nothing beyond max_length."""
    room = session.max_length - len(session.tokens)
    if len(token_ids) < room and session.stop_token_ids.isdisjoint(token_ids):
        return token_ids, None
    for index, token in enumerate(token_ids[:room]):
        if token in session.stop_token_ids:
            return token_ids[: index + 1], verifier_pb2.FINISH_REASON_STOP
    if len(token_ids) >= room:
        return token_ids[:room], verifier_pb2.FINISH_REASON_LENGTH
    return token_ids, None
