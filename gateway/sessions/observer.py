"""The interface of everything that watches requests and sessions without taking part.

The code of sessions calls these methods at the moments they are named after, and does not know its observers: the
process makes them (`gateway.telemetry.observers`). A method returns at once and raises nothing; one that an
observer does not override does nothing. None is called once per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from gateway.request_context import RequestContext
from gateway.requests.resolved_request import ResolvedRequest
from gateway.sessions.output_stream import Event
from gateway.sessions.request_stats import RequestStats
from slipstream.errors import UNSERVED, Aborted, Internal, SlipstreamError
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2


class SessionObserver:
    """Watches one session for as long as this gateway runs it."""

    def run_began(self) -> None: ...

    def verifier_wait_began(self) -> None: ...

    def verifier_wait_ended(self) -> None: ...

    def reopening(self) -> None:
        """The session lost its verifier and is about to be opened again."""

    def opening(self, verifier: str, epoch: int, length: int) -> None:
        """An Open with the first `length` tokens is about to be sent to the verifier at this address."""

    def arithmetic_changed(self, before: str, after: str, length: int) -> None:
        """The text goes on behind `length` tokens with another arithmetic than wrote it so far: it is neither's."""

    def drafters_reported(self, events: Sequence[verifier_pb2.DrafterEvent]) -> None:
        """The verifier lost drafters or has them back."""

    def commit_began(self) -> None: ...

    def commit_ended(self, rounds: Sequence[verifier_pb2.Round], error: BaseException | None) -> None:
        """The write of these rounds to the session log ended, with an error or without."""

    def round_shown(self, done: verifier_pb2.Round) -> None:
        """The round's tokens are in the log and on the stream; the session's RequestStats count them already."""

    def verifier_lost(self, error: SlipstreamError) -> None: ...

    def verifier_left(self, undone: Sequence[verifier_pb2.Round], *, complete: bool) -> None:
        """The session is closed on its verifier; `undone`: rounds that were received and not written to the log;
        `complete`: its text is all there."""

    def session_finished(self, finished: gateway_pb2.Finished, occupancy: float) -> None:
        """The session ended with this outcome. `occupancy`: see DrafterAssignment."""

    def run_ended(self, outcome: str) -> None:
        """`outcome`: a label of the metric `slipstream_requests`."""


class RequestObserver:
    """Watches one call of a client."""

    def generate_requested(self, request: gateway_pb2.GenerateRequest) -> None:
        """The request as it came: nothing of it is checked yet."""

    def event_sent(self, event: Event) -> None:
        """The event is about to be sent to the client."""


class Observers:
    """Makes the observers of requests and sessions. This one makes such as do nothing."""

    def watch_request(self, name: str, context: RequestContext) -> AbstractContextManager[RequestObserver]:
        """Around a call of this name, from its arrival to its end; may add to the context's trailers at the end."""
        return nullcontext(RequestObserver())

    def admitting(self) -> AbstractContextManager[None]:
        """Around what may refuse a request."""
        return nullcontext()

    def watch_session(
        self, session_id: str, resolved: ResolvedRequest, stats: RequestStats, *, from_beginning: bool
    ) -> SessionObserver:
        """`from_beginning`: the session is new; one that is taken up has a past that was not observed here."""
        return SessionObserver()

    def trace_context(self) -> Callable[[], types_pb2.TraceContext] | None:
        """Makes the message with which a verifier joins the trace of the current request; None where there is none."""
        return None


def outcome_of(error: SlipstreamError) -> str:
    """The outcome of a session that this error ended, as metrics name it."""
    if isinstance(error, Internal):
        return "failed"
    if isinstance(error, Aborted):  # rolled back or taken over, as a client wanted it
        return "fenced"
    return "unavailable" if error.code in UNSERVED else "invalid"
