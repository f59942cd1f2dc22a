"""The gRPC server of every role: health, TLS, limits, and which role may call what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2_grpc

from slipstream.errors import PermissionDenied, Unavailable
from slipstream.rpc import DRAFTER, GATEWAY, VERIFIER
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.rpc.health import Health
from slipstream.rpc.status_interceptor import Authorise, Context, Read, Receiving, StatusInterceptor, allow_all
from slipstream.rpc.tls import Certificates, server_credentials

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # two processes on one port would silently share its connections
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # What a connection may cost before its caller is authorised.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.http2.max_ping_strikes", 2),
)
Register = Callable[[grpc.aio.Server], None]
HEALTH = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""The health service's name for liveness probes: SERVING for as long as the event loop answers, whatever the load and
the peers. Without a name it answers whether to send work."""
ALLOWED_ROLES: Mapping[str, frozenset[str]] = {
    "slipstream.v1.VerifierService": frozenset({GATEWAY}),
    "slipstream.v1.DrafterService": frozenset({VERIFIER}),
    "slipstream.v1.WorkerService": frozenset({GATEWAY, VERIFIER}),
    HEALTH: frozenset({DRAFTER, VERIFIER, GATEWAY}),
}
"""The roles that may call each service; no role may call a service that is not listed. The gateway's own service is not
listed: its port is for clients, which have API keys (`gateway.auth.api_keys`)."""


@dataclass(frozen=True, slots=True)
class AccessControl:
    """Which callers a port admits."""

    credentials: grpc.ServerCredentials | None = None
    """None: plaintext."""
    authorise: Authorise = allow_all


def role_access(certificates: Certificates | None) -> AccessControl:
    """Access for other roles only, proven by their certificates; for every caller where none are configured."""
    if certificates is None:
        return AccessControl()
    return AccessControl(server_credentials(certificates, ask_clients=True), _authorise_role(certificates.domain))


def _authorise_role(domain: str) -> Authorise:
    """Reads the roles from the caller's certificate; the holder of several may do what any of them may."""

    async def authorise(method: str, context: Context) -> Context:
        allowed = ALLOWED_ROLES.get(service_of(method), frozenset())
        names = {name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())}
        if names.isdisjoint(f"{role}.{domain}" for role in allowed):
            wanted = " or ".join(f"{role}.{domain}" for role in sorted(allowed)) or "no role"
            raise PermissionDenied(
                f"{method} is for {wanted}; the caller's certificate names {', '.join(sorted(names)) or 'no role'}.",
                reason="ROLE",
            )
        return context

    return authorise


def service_of(method: str) -> str:
    """`/package.Service/Method` -> `package.Service`."""
    return method.strip("/").partition("/")[0]


class Server:
    """A gRPC server with the health service. `start` binds, `set_serving` sets the health status, `stop` drains."""

    def __init__(
        self,
        services: Sequence[Register],
        access: AccessControl | None = None,
        options: Mapping[str, int] | None = None,
        most_bytes: int | None = None,
        read: Read | None = None,
        receiving: Receiving | None = None,
    ) -> None:
        """`options`: gRPC channel arguments that add to SERVER_OPTIONS or replace some of them. `most_bytes`: of a
        request, at most what gRPC lets through. `read`: parses single requests; None: as gRPC does. `receiving`: held
        while one is received; None: nothing."""
        access = access or AccessControl()
        self._credentials = access.credentials
        interceptor = StatusInterceptor(access.authorise, most_bytes, read, receiving)
        self.errors = interceptor.errors
        self._server = grpc.aio.server(
            interceptors=[interceptor],
            options=tuple((dict(SERVER_OPTIONS) | dict(options or {})).items()),
        )
        self._probes: grpc.aio.Server | None = None
        self._health = Health()
        self._ending = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        named = _NamedServices(self._server)
        for register in services:
            register(cast(grpc.aio.Server, named))
        self._checked = ("", *named.names)
        """Names that health checks ask for: clients' service configurations name the service that they call."""
        self.address = self.http_address = self.health_address = self.metrics_address = ""

    async def start(self, listen: str, health_listen: str = "") -> str:
        """Bind HOST:PORT (port 0 picks a free one) and return the address bound. Raises Unavailable.

        `health_listen`: one more address, in plaintext, for the health service alone: probes have no certificates.
        """
        await self.set_serving(False)
        self._health.set(LIVENESS, True)
        self.address = _bind(self._server, listen, self._credentials)
        if health_listen:
            self._probes = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            self.health_address = _bind(self._probes, health_listen, None)
            await self._probes.start()
        await self._server.start()
        return self.address

    @property
    def announcement(self) -> str:
        """The line that a role prints when it can serve."""
        others = {"http": self.http_address, "health": self.health_address, "metrics": self.metrics_address}
        return " ".join([f"ready grpc={self.address}", *(f"{name}={at}" for name, at in others.items() if at)])

    async def set_serving(self, ready: bool) -> None:
        """Set what health checks answer; NOT_SERVING for good once the server is stopping."""
        for name in self._checked:
            self._health.set(name, ready and not self._ending)

    async def stop(self, grace_s: float) -> None:
        self._ending = True
        await self.set_serving(False)
        await self._server.stop(grace_s)
        if self._probes is not None:
            await self._probes.stop(None)


class _NamedServices:
    """A server that services register with, and their names."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self.names.append(service)
        self._server.add_registered_method_handlers(service, handlers)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}; choose another address or port 0.") from error
    return f"{listen.rpartition(':')[0]}:{port}"
