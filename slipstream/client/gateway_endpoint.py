"""A client's connection to a gateway: optional TLS, and the API key with every call. How keys are made and hashed."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from slipstream.config import boolean
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.rpc.channel import CHANNEL_OPTIONS

PREFIX = "slipstream-"
"""Lets scanners for secrets recognise a key in repositories and logs."""
KEY_BYTES = 32
SERVER_NAME = "SLIPSTREAM_SERVER_NAME"
"""The variable with the default of `GatewayEndpoint.server_name`."""
PLAINTEXT_KEY = "SLIPSTREAM_PLAINTEXT_KEY"
"""The variable with the default of `GatewayEndpoint.plaintext_key`."""
KEY_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Valid names of a key and its tenant."""


def plaintext_key_by_default() -> bool:
    """Reads the variable: true or false, and false without it. Raises InvalidArgument for anything else."""
    return boolean(PLAINTEXT_KEY, os.environ.get(PLAINTEXT_KEY, "false"))


@dataclass(frozen=True, slots=True)
class GatewayEndpoint:
    """A gateway's address, with credentials."""

    address: str
    key: str = field(default="", repr=False)
    tls: bool = False
    ca: str = ""
    """PEM file of the CA of the gateway's certificate; empty: the system's CAs. Implies TLS."""
    traceparent: str = ""
    """W3C trace context of the span that requests belong to; empty for none."""
    tracestate: str = ""
    """W3C trace state beside it."""
    server_name: str = field(default_factory=lambda: os.environ.get(SERVER_NAME, ""))
    """The name in the gateway's certificate where the address has another: a forwarded port, a balancer's IP address.
    Empty: the address's own."""
    plaintext_key: bool = field(default_factory=plaintext_key_by_default)
    """Send the key without TLS to other machines too: whoever reads that network has it. For one that is yours, such as
    inside a cluster."""

    def channel(self) -> grpc.aio.Channel:
        """Raises InvalidArgument for a CA that cannot be read or a malformed key, and FailedPrecondition where the
        key would be sent in plaintext to another machine without `plaintext_key`."""
        if not (self.key.isascii() and self.key.isprintable()):
            raise InvalidArgument("an API key is one line of ASCII; give it as `slipstream key` printed it.")
        metadata = {
            "authorization": f"Bearer {self.key}" if self.key else "",
            "traceparent": self.traceparent,
            "tracestate": self.tracestate,
        }
        interceptors = _adding(tuple((name, value) for name, value in metadata.items() if value))
        if self.tls or self.ca:
            credentials = grpc.ssl_channel_credentials(self._authorities())
            named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
            options = [*CHANNEL_OPTIONS, *named]
            return grpc.aio.secure_channel(self.address, credentials, options, interceptors=interceptors)
        if self.key and not self.plaintext_key:
            check_plaintext_key(self.address, self.address, "--tls or --ca FILE")
        return grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS, interceptors=interceptors)

    def _authorities(self) -> bytes | None:
        try:
            return Path(self.ca).read_bytes() if self.ca else None
        except OSError as error:
            raise InvalidArgument(f"the CA file {self.ca} cannot be read: {error.strerror}.") from error


def is_local(address: str) -> bool:
    """Whether the address is written as this machine's own; any other host name could point anywhere."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_plaintext_key(address: str, name: str, remedy: str) -> None:
    """Raises FailedPrecondition for the address of another machine, which errors name `name`: a key is not sent there
    without TLS. `remedy`: what to use instead."""
    if not is_local(address):
        raise FailedPrecondition(
            f"an API key is not sent to {name} in plaintext; use {remedy}, or, on a network that is yours, "
            "--plaintext-key."
        )


def sampled_parent() -> str:
    """A random `traceparent` with the sampled flag, which requests a trace. The state `spans.UNSENT_PARENT` goes with
    it."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest(key: str) -> bytes:
    """SHA-256, plain: a key is 256 random bits, so there is no dictionary to try and nothing for salt or a slow hash to
    protect; a slow one would only let strangers burn the gateway's time."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


Metadata = tuple[tuple[str, str], ...]


def _adding(metadata: Metadata) -> tuple[grpc.aio.ClientInterceptor, ...]:
    """Interceptors that add the metadata to every call."""
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
