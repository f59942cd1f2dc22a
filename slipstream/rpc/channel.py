"""Dialling: one way to make a channel, one way to read an error that came back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from slipstream.errors import InvalidArgument, SlipstreamError, Unavailable, from_code
from slipstream.rpc.renewed_channel import RenewedChannel
from slipstream.rpc.tls import Certificates, Material, channel_credentials

Dial = Callable[[str], grpc.aio.Channel]
Message = TypeVar("Message")

HANDSHAKE = "HANDSHAKE"
"""Of UNAVAILABLE: somebody is there, and the connection was not made for want of TLS or the right certificate."""

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
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to HOST:PORT, with the keepalive that notices a frozen peer."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def dialling(role: str, certificates: Certificates | None) -> Dial:
    """How to reach peers of a role: in plaintext, or with these certificates and nobody who cannot prove the role."""
    if certificates is None:
        return channel
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", f"{role}.{certificates.domain}"))

    def dial(address: str) -> grpc.aio.Channel:
        def make(material: Material) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(address, channel_credentials(material), options=options)

        return RenewedChannel(certificates, make)

    return dial


def parsed(message: Message | None) -> Message:
    """What a peer said. Raises InvalidArgument for bytes that are no protobuf of this contract, of which grpc.aio makes
    None instead of an error."""
    if message is None:
        raise InvalidArgument("a message is no protobuf of this contract.")
    return message


def error_of(error: grpc.RpcError) -> SlipstreamError:
    """The typed error behind a failed call, its reason included when the peer sent one."""
    code: grpc.StatusCode = error.code()
    details = error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and (sentence := _refused(details)):
        return Unavailable(sentence, reason=HANDSHAKE)
    reason, retry_s = _told(error)
    known = from_code(code.value[0], details, reason)
    known.retry_s = retry_s
    return known


def _refused(details: str) -> str:
    """What gRPC says of a handshake that failed, in words that help; empty for anything else."""
    if "Hostname Verification" in details:
        return "the peer's certificate does not name who was to be reached; look at the DNS names in it."
    if "WRONG_VERSION_NUMBER" in details:
        return "the peer speaks plaintext and TLS was asked for; configure TLS there, or none here."
    if "certificate signature failure" in details or "CERTIFICATE_VERIFY_FAILED" in details:
        return "the peer's certificate is not signed by the CA that is trusted here, or has expired."
    if "handshake failed" in details.lower():
        return "the TLS handshake with the peer failed; look at the certificates of both sides."
    if details.startswith("failed to connect") and details.endswith("Socket closed"):
        return "the peer broke off before a word was said: it wants TLS, or does not accept the certificate shown."
    return ""


def _told(error: grpc.RpcError) -> tuple[str, float | None]:
    """Reason, and seconds until it is worth trying again, where the peer sent them."""
    reason, retry_s = "", None
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason = str(info.reason)
            elif detail.Unpack(retry):
                retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    except (ValueError, OverflowError, DecodeError):  # details that contradict their status or are no protobuf
        pass
    return reason, retry_s
