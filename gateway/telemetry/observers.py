"""The observers of a gateway's requests and sessions: its metrics, and traces and an experiment where there are any."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from gateway.request_context import RequestContext
from gateway.requests.resolved_request import ResolvedRequest
from gateway.sessions.observer import Observers, RequestObserver, SessionObserver
from gateway.sessions.request_stats import RequestStats
from gateway.telemetry.experiment_samples import ExperimentSamples
from gateway.telemetry.gateway_spans import current_context, current_exemplar, session_trace, traced
from gateway.telemetry.request_metrics import RequestMetrics, SessionMetrics
from slipstream.telemetry.composite import composite
from slipstream.telemetry.tracing import Tracing
from slipstream.v1 import types_pb2


class GatewayObservers(Observers):
    def __init__(
        self, metrics: RequestMetrics, tracing: Tracing | None, samples: ExperimentSamples | None = None
    ) -> None:
        """Without `tracing` no request is traced; without `samples` no experiment runs."""
        self.metrics = metrics
        self.samples = samples
        self._tracing = tracing

    def watch_request(self, name: str, context: RequestContext) -> AbstractContextManager[RequestObserver]:
        if self._tracing is None:
            return super().watch_request(name, context)
        return traced(self._tracing, name, context, self.metrics.objectives)

    def admitting(self) -> AbstractContextManager[None]:
        return self.metrics.admitting()

    def watch_session(
        self, session_id: str, resolved: ResolvedRequest, stats: RequestStats, *, from_beginning: bool
    ) -> SessionObserver:
        counting = SessionMetrics(
            self.metrics, resolved, stats, from_beginning=from_beginning, exemplar=current_exemplar()
        )
        trace = session_trace(resolved.arm)
        sample = (
            self.samples.sample(resolved.arm, session_id) if self.samples and resolved.arm and from_beginning else None
        )
        return composite(SessionObserver, [each for each in (counting, trace, sample) if each is not None])

    def trace_context(self) -> Callable[[], types_pb2.TraceContext] | None:
        return current_context()
