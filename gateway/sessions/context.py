"""What all sessions of a gateway share."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.experiments.trial import Trial
from gateway.routing.router import Router
from gateway.telemetry.request_metrics import RequestMetrics
from slipstream.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class GatewayContext:
    config: GatewayConfig
    router: Router
    meters: RequestMetrics = field(default_factory=RequestMetrics)
    tracing: Tracing | None = None
    """None: no request is traced."""
    trial: Trial | None = None
    """Where an experiment runs."""
