"""Dependencies of HTTP routes: the gateway's application code, the same objects that gRPC calls."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.routing.router import Router
from gateway.sessions.registry import SessionRegistry
from gateway.store.measured import MeasuredStore
from gateway.text.tokenizer import Tokenizer
from gateway.work.tenant_work import TenantWork
from slipstream.rpc.server import Server
from slipstream.telemetry.metrics_collector import MetricsCollector


@dataclass(frozen=True, slots=True)
class HttpDependencies:
    config: GatewayConfig
    sessions: SessionRegistry
    router: Router
    tokenizer: Tokenizer
    metrics: MetricsCollector
    grpc: Server
    """The server of the same sessions over gRPC."""
    work: TenantWork
    """Work that must not run on the event loop."""
    store: MeasuredStore
