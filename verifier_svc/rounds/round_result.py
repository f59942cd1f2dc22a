"""The part of one session in a step that decided tokens for it, and the `Round` that its gateway is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.rpc import proto_conversion
from slipstream.rpc.proto_conversion import microseconds
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.executor import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Monotonic seconds of one step, and its size."""

    due: float
    """When it could have started: the step before it ended, or there was work again."""
    started: float
    ended: float
    waited: float
    """Seconds for which the step was held back for masks and candidates (`verifier_svc.wait_policy`)."""
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
        """Builds the message to the session's gateway. cost_s: seconds of the step that count as the session's."""
        scheduled, timing = self.scheduled, self.timing
        return verifier_pb2.Round(
            session=scheduled.session.request.number,
            epoch=scheduled.session.request.epoch,
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
            prompt_logprobs=self._prompt_logprobs() if scheduled.session.prompt_logprobs else (),
        )

    def _prompt_logprobs(self) -> list[types_pb2.TokenLogprobs]:
        found = self.scheduled.session.prompt_logprobs
        return [proto_conversion.logprobs_to_proto(found[place]) for place in sorted(found)]

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
