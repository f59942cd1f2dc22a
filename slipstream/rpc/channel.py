"""gRPC channels to the other roles, and the typed error behind a failed call.

A channel outlives its certificates: gRPC cannot change those of a client, so a new channel takes over.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from slipstream.errors import (
    NOT_PROTOBUF,
    FailedPrecondition,
    InvalidArgument,
    SlipstreamError,
    Unavailable,
    from_code,
)
from slipstream.rpc.tls import Certificates, Material, channel_credentials

Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to HOST:PORT."""
Message = TypeVar("Message")

HANDSHAKE = "HANDSHAKE"
"""Reason of an UNAVAILABLE: the peer is there, and the connection failed for want of TLS or the right certificate."""

WRONG_SERVICE = "WRONG_SERVICE"
"""Reason of a FAILED_PRECONDITION: the peer lacks the method that was called."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

# A frozen peer is noticed only with keepalive *and* the ping timeout: keepalive alone took 60 s where both took 2.4 s.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A rollout may replace all pods of a name within gRPC's 30 s between two looks at it: 29 requests failed so.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to HOST:PORT, with the keepalive that notices a frozen peer."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def dialer(role: str, certificates: Certificates | None) -> Dial:
    """Returns the dialer of a role's peers: in plaintext, or by TLS to peers whose certificate proves that role."""
    if certificates is None:
        return channel
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", f"{role}.{certificates.domain}"))

    def dial(address: str) -> grpc.aio.Channel:
        def make(material: Material) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(address, channel_credentials(material), options=options)

        return RenewedChannel(certificates, make)

    return dial


class RenewedChannel(grpc.aio.Channel):
    """Makes each call on a channel with the present certificates: when they changed, on a new one.

    Calls that run keep the channel that they began on, and it closes with the last of them. A multiplexed stream is
    opened again after every loss, so nothing else has to follow a change.
    """

    def __init__(self, certificates: Certificates, make: Callable[[Material], grpc.aio.Channel]) -> None:
        self._certificates = certificates
        self._make = make
        self._material = certificates.current()
        self._channel = make(self._material)
        self._living = weakref.WeakSet([self._channel])

    def unary_unary(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("unary_unary", method, serialisers)

    def unary_stream(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("unary_stream", method, serialisers)

    def stream_unary(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("stream_unary", method, serialisers)

    def stream_stream(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("stream_stream", method, serialisers)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for channel in list(self._living):
            await channel.close(grace)

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _present(self) -> grpc.aio.Channel:
        material = self._certificates.current()
        if material is not self._material:
            self._material, self._channel = material, self._make(material)
            self._living.add(self._channel)
        return self._channel

    def _calling(self, kind: str, method: Any, serialisers: Any) -> Any:
        def call(*request: Any, **options: Any) -> Any:
            channel = self._present()
            made = getattr(channel, kind)(*method, **serialisers)(*request, **options)
            made.add_done_callback(lambda _, kept=channel: None)  # without its last reference a channel closes
            return made

        return call


def parsed(message: Message | None) -> Message:
    """The message. Raises InvalidArgument for None, which grpc.aio returns for bytes that are no protobuf of this
    contract."""
    if message is None:
        raise InvalidArgument("a message is no protobuf of this contract.", reason=NOT_PROTOBUF)
    return message


def error_of(error: grpc.RpcError) -> SlipstreamError:
    """The typed error behind a failed call, its reason included when the peer sent one."""
    code: grpc.StatusCode = error.code()
    details = error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and (sentence := _handshake_failure(details)):
        return Unavailable(sentence, reason=HANDSHAKE)
    details_sent = _error_details(error)
    reason = details_sent.reason
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return FailedPrecondition(
            "another service answers at this address, or another version of it; --server wants a gateway's address, "
            "--worker a verifier's or drafter's.",
            reason=WRONG_SERVICE,
        )
    if code is grpc.StatusCode.CANCELLED and not reason:  # not by us, or it would be a CancelledError
        return Unavailable("the peer ended while it answered")
    known = from_code(code.value[0], _connection_failure(details) or details, reason)
    known.retry_s, known.field, known.numbers = details_sent.retry_s, details_sent.field, details_sent.numbers
    return known


def _handshake_failure(details: str) -> str:
    """A sentence for gRPC's text about a failed handshake; empty for any other text."""
    if "Hostname Verification" in details:
        return "the peer's certificate does not name the host that was dialled; look at the DNS names in it."
    if "WRONG_VERSION_NUMBER" in details:
        return "the peer answers in plaintext, but TLS is configured here; configure TLS there, or none here."
    if "certificate signature failure" in details or "CERTIFICATE_VERIFY_FAILED" in details:
        return "the peer's certificate is not signed by the CA that is trusted here, or has expired."
    if "handshake failed" in details.lower():
        return "the TLS handshake with the peer failed; look at the certificates of both sides."
    if details.startswith("failed to connect") and details.endswith("Socket closed"):
        return "the peer closed the connection at once: it wants TLS, or does not accept the certificate shown."
    return ""


def _connection_failure(details: str) -> str:
    """A sentence for gRPC's text about a connection that failed for a common reason; empty for any other text."""
    found = re.search(r"ipv[46]:(\S+?):? ", details)
    peer = unquote(found[1]) if found else "the address"
    if "Connection refused" in details:
        return f"nothing listens at {peer}; start it, or give another address."
    if "Failed parsing HTTP/2" in details:
        return f"{peer} answers, but not by gRPC: a web server or a metrics port, perhaps; give another port."
    if "ping timeout" in details:
        return f"{peer} accepts connections and answers nothing: a frozen process or another protocol."
    if "hostname lookup error" in details or "Domain name not found" in details:
        return "the host name is not known; look at the address."
    if details == "Deadline Exceeded":
        return "no answer came in time; look at the address, and whether that process is frozen."
    return ""


@dataclasses.dataclass(slots=True)
class _Details:
    """Details that a peer sent with a status; as in SlipstreamError."""

    reason: str = ""
    retry_s: float | None = None
    field: str = ""
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


def _error_details(error: grpc.RpcError) -> _Details:
    sent = _Details()
    info, retry, wrong = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            if detail.Unpack(info):
                sent.reason = str(info.reason)
                sent.numbers = {name: float(value) for name, value in info.metadata.items()}
            elif detail.Unpack(retry):
                sent.retry_s = retry.retry_delay.ToTimedelta().total_seconds()
            elif detail.Unpack(wrong) and wrong.field_violations:
                sent.field = wrong.field_violations[0].field
    except (ValueError, OverflowError, DecodeError):  # details that contradict their status or are no protobuf
        pass
    return sent
