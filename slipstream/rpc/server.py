"""Serving: one bootstrap for every role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from slipstream.errors import Unavailable
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.rpc.status_interceptor import Authorise, ErrorInterceptor, anybody

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),  # two processes on one port would silently share its connections
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # What a connection may cost before anything is asked of its owner.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.http2.max_ping_strikes", 2),
)
Register = Callable[[grpc.aio.Server], None]
HEALTH = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""What health checks name that would restart the process: it serves for as long as its loop answers, whatever its load
and its peers. Those without a name ask whether to send work."""


@dataclass(frozen=True, slots=True)
class AccessControl:
    """Who gets in at a port."""

    credentials: grpc.ServerCredentials | None = None
    """None: plaintext."""
    authorise: Authorise = anybody


class Server:
    """A gRPC server with health. `start` binds, `stop` drains; the health service is told by `serving`."""

    def __init__(
        self,
        services: Sequence[Register],
        access: AccessControl | None = None,
        options: Mapping[str, int] | None = None,
    ) -> None:
        """`options`: of gRPC, besides SERVER_OPTIONS or instead of them."""
        access = access or AccessControl()
        self._credentials = access.credentials
        interceptor = ErrorInterceptor(access.authorise)
        self.errors = interceptor.errors
        self._server = grpc.aio.server(
            interceptors=[interceptor],
            options=tuple((dict(SERVER_OPTIONS) | dict(options or {})).items()),
        )
        self._probes: grpc.aio.Server | None = None
        self._health = HealthServicer()
        self._ending = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for register in services:
            register(self._server)
        self.address = self.health_address = self.metrics_address = ""

    async def start(self, listen: str, health_listen: str = "") -> str:
        """Bind HOST:PORT (port 0 picks a free one) and return the address bound. Raises Unavailable.

        `health_listen`: one more address, in plaintext, for the health service alone: probes have no certificates.
        """
        await self.serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
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
        others = {"health": self.health_address, "metrics": self.metrics_address}
        return " ".join([f"ready grpc={self.address}", *(f"{name}={at}" for name, at in others.items() if at)])

    async def serving(self, ready: bool) -> None:
        """Tell health checks whether to send work here."""
        ready = ready and not self._ending
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", state)

    async def stop(self, grace_s: float) -> None:
        self._ending = True
        await self.serving(False)
        await self._server.stop(grace_s)
        if self._probes is not None:
            await self._probes.stop(None)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {listen}; choose another address or port 0.") from error
    return f"{listen.rpartition(':')[0]}:{port}"
