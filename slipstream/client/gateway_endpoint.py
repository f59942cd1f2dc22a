"""How a client reaches a gateway: TLS if wanted, and its API key with every call."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.rpc.channel import CHANNEL_OPTIONS


@dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """A gateway's address and what opens it."""

    address: str
    key: str = field(default="", repr=False)
    tls: bool = False
    ca: str = ""
    """PEM file of the CA that signed the gateway's certificate; empty: those the system trusts. Implies TLS."""
    traceparent: str = ""
    """W3C's name of a span that requests are part of; empty: none."""

    def channel(self) -> grpc.aio.Channel:
        """Raises InvalidArgument for a CA that cannot be read or a key that can be none; FailedPrecondition where the
        key would be readable on its way."""
        if not (self.key.isascii() and self.key.isprintable()):
            raise InvalidArgument("an API key is one line of ASCII; give it as `slipstream key` printed it.")
        metadata = {"authorization": f"Bearer {self.key}" if self.key else "", "traceparent": self.traceparent}
        interceptors = _saying(tuple((name, value) for name, value in metadata.items() if value))
        if self.tls or self.ca:
            credentials = grpc.ssl_channel_credentials(self._authorities())
            return grpc.aio.secure_channel(self.address, credentials, CHANNEL_OPTIONS, interceptors=interceptors)
        if self.key and not _here(self.address):
            raise FailedPrecondition(f"an API key is not sent to {self.address} in plaintext; use --tls or --ca FILE.")
        return grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS, interceptors=interceptors)

    def _authorities(self) -> bytes | None:
        try:
            return Path(self.ca).read_bytes() if self.ca else None
        except OSError as error:
            raise InvalidArgument(f"the CA file {self.ca} cannot be read: {error.strerror}.") from error


def _here(address: str) -> bool:
    """Whether it is this machine's own, by what is written: a name could be anybody's."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def sampled_parent() -> str:
    """A `traceparent` that asks for a trace: of a span that is nobody's."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


Metadata = tuple[tuple[str, str], ...]


def _saying(metadata: Metadata) -> tuple[grpc.aio.ClientInterceptor, ...]:
    """With every call."""
    return (_Unary(metadata), _Stream(metadata)) if metadata else ()


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with(details, self._metadata), request)


class _Stream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with(details, self._metadata), request)


def _with(details: Any, metadata: Metadata) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), *metadata))
