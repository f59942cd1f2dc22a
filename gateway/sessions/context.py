"""What all sessions of a gateway share."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.meters import Meters
from gateway.routing import Router
from gateway.trial import Trial
from slipstream.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Stage:
    config: GatewayConfig
    router: Router
    meters: Meters = field(default_factory=Meters)
    tracing: Tracing | None = None
    """None: no request is traced."""
    trial: Trial | None = None
    """Where an experiment runs."""
