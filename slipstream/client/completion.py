"""One completion as a client sees it: the events of a Generate stream folded into text, tokens and figures."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from slipstream.errors import Unavailable
from slipstream.v1 import gateway_pb2, verifier_pb2

Event = gateway_pb2.GenerateResponse | gateway_pb2.ResumeResponse
TRACE_ID = "trace-id"
"""Trailing metadata with the trace id, sent by a gateway that traces the request."""
FINISH_REASONS = {
    verifier_pb2.FINISH_REASON_STOP: "stop",
    verifier_pb2.FINISH_REASON_LENGTH: "length",
    verifier_pb2.FINISH_REASON_CANCELLED: "cancelled",
    verifier_pb2.FINISH_REASON_ERROR: "error",
}


def _gap() -> Unavailable:
    return Unavailable("a part of the text is missing.", reason="GAP")


def _token(text: gateway_pb2.TokenText, logprob: float) -> dict[str, object]:
    return {"token_id": text.token_id, "token": text.text, "bytes": list(text.bytes), "logprob": logprob}


def _likelihood(logprob: gateway_pb2.Logprob) -> dict[str, object]:
    top = [_token(other.token, other.logprob) for other in logprob.top]
    return {**_token(logprob.token, logprob.logprob), "top_logprobs": top}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an output, as it becomes final."""

    offset: int
    """Index of the first token among the output's tokens."""
    token_ids: tuple[int, ...]
    text: str
    """Empty while a character is incomplete or a stop string may be beginning."""
    logprobs: Sequence[gateway_pb2.Logprob] = ()
    """One for each token, if requested."""


@dataclass(slots=True)
class Completion:
    """Output of one completion as received so far."""

    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    finished: gateway_pb2.Finished = field(default_factory=gateway_pb2.Finished)
    begins: int = 0
    """Output tokens that the client had before. Of those only their number is known: `token_ids` has placeholders."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[gateway_pb2.Logprob] = field(default_factory=list)
    """One for each token, if requested; none for tokens that another gateway sent before."""
    likely: list[int] = field(default_factory=list)
    """Positions of the tokens of `logprobs`."""
    mixed_arithmetic: bool | None = None
    """Permission that a resumed session is given: see GenerateOptions."""
    trace_id: str = ""
    """Trace id of the latest request for this completion; empty if it is not traced."""

    def take(self, response: Event) -> str:
        """Adds one event and returns its text. Raises Unavailable for a gap before it."""
        kind = response.WhichOneof("event")
        if kind == "started":
            self.started = response.started
        elif kind == "delta":
            return self._extend(response.delta)
        elif kind == "finished":
            if response.finished.output_tokens > len(self.token_ids):
                raise _gap()
            self.finished = response.finished
            del self.token_ids[self.finished.output_tokens :]
            kept = bisect_left(self.likely, self.finished.output_tokens)
            del self.logprobs[kept:], self.likely[kept:]
        return ""

    def _extend(self, delta: gateway_pb2.Delta) -> str:
        """Adds a delta and returns its text; ignores one that was received before."""
        if not self.started.session_id or delta.offset > len(self.token_ids):
            raise _gap()
        if delta.offset < len(self.token_ids):
            return ""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.likely += range(delta.offset, delta.offset + len(delta.logprobs))
        self.text += delta.text
        return delta.text

    def forget(self) -> None:
        """Resets the completion, whose session starts again."""
        fresh = Completion()
        for part in fields(self):
            setattr(self, part.name, getattr(fresh, part.name))

    @property
    def session_id(self) -> str:
        """Id of the session, by which it can be resumed, rolled back and cancelled; empty until it has begun."""
        return self.started.session_id

    @property
    def seed(self) -> int:
        """Seed of the sampling, which repeats the text."""
        return self.started.seed

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, `cancelled` or `error`; `unknown` before the end."""
        return FINISH_REASONS.get(self.finished.reason, "unknown")

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first, (E2E - TTFT) / (n - 1); None for fewer than two."""
        seen = self.finished.statistics
        return (seen.e2e_s - seen.ttft_s) / (seen.emitted - 1) if seen.emitted > 1 else None

    def report(self) -> dict[str, object]:
        """The object that `--json` prints. Seconds; rates are null where nothing was counted."""
        seen = self.finished.statistics
        return {
            "text": self.text,
            "token_ids": self.token_ids[self.begins :],
            "prompt_token_ids": list(self.started.prompt_token_ids),
            "logprobs": [_likelihood(each) for each in self.logprobs] or None,
            "finish_reason": self.finish_reason,
            "stop": self.finished.stop or None,
            "stop_token_id": self.finished.stop_token_id if self.finished.HasField("stop_token_id") else None,
            "session_id": self.session_id,
            "trace_id": self.trace_id or None,
            "model": self.started.model,
            "seed": self.seed,
            "rounds": seen.rounds,
            "rounds_with_drafts": seen.rounds_with_drafts,
            "drafted": seen.drafted,
            "accepted": seen.accepted,
            "acceptance_rate": seen.accepted / seen.drafted if seen.drafted else None,
            "acceptance_length": 1 + seen.accepted / seen.rounds_with_drafts if seen.rounds_with_drafts else None,
            "lossy": seen.lossy,
            "arithmetics": [{"arithmetic": each.arithmetic, "offset": each.offset} for each in seen.arithmetics],
            "ttft_s": seen.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": seen.e2e_s,
            "wait_s": seen.wait_s,
            "verify_s": seen.verify_s,
            "bubble_s": seen.bubble_s,
            "rehomed": seen.rehomed,
            "hits": seen.hits,
            "misses": dict(seen.misses),
            "accepted_prediction_tokens": seen.accepted_prediction_tokens,
            "rejected_prediction_tokens": seen.rejected_prediction_tokens,
            "drafters": {share.name: {"drafted": share.drafted, "accepted": share.accepted} for share in seen.drafters},
        }
