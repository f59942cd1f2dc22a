"""What HTTP routes are built on: the gateway's application code, the same objects that gRPC calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.routing.router import Router
from gateway.sessions.registry import SessionRegistry
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from slipstream.telemetry.metrics_collector import MetricsCollector


@dataclass(frozen=True, slots=True)
class HttpParts:
    config: GatewayConfig
    sessions: SessionRegistry
    router: Router
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None for a model without a chat template."""
    metrics: MetricsCollector
    ready: Callable[[], bool]
    """Returns True while the gateway should be sent work."""
