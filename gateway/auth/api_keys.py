"""The API keys that open a gateway: a TOML file, one line a key, read again when it changes.

    alice = { sha256 = "64 hex digits", sessions = 8, tokens_per_minute = 100000 }

The fields besides `sha256` are those of `gateway.auth.tenant.TenantLimits`; `slipstream key alice` makes a key and its
line. A key that is taken out of the file opens nothing any more; what runs already ends by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import ipaddress
import logging
import re
import time
import tomllib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from gateway.auth.loop_turns import TENANT
from gateway.auth.tenant import MINUTE_S, Tenant, TenantLimits
from gateway.store.quota import SharedQuota
from slipstream.client.gateway_endpoint import KEY_NAME, digest
from slipstream.concurrency import TokenBucket
from slipstream.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from slipstream.telemetry.log_once import LogOnce

log = logging.getLogger(__name__)

SCHEME = "Bearer "
MAX_KEY_CHARACTERS = 256
MOST_ORIGINS = 4096
"""Origins of wrong keys that are remembered: for a new one, the one that failed longest ago is forgotten."""
NETWORK_BITS = 64
"""Bits of an IPv6 address that count; the rest of it is its owner's to choose."""
LEAST_PRIORITY = -(2**31)
Stamp = tuple[int, int, int]
"""Modification time, inode and size: differ when a file was replaced."""


class Credentials(Protocol):
    """A call of a client, as far as its key is read from it."""

    @property
    def peer(self) -> str:
        """As `RequestContext.peer`."""

    def header(self, name: str) -> str:
        """The value of a header that was sent exactly once; empty for none and for several."""


class ApiKeys:
    """The constructor raises InvalidArgument for a file that cannot be used; later the last good state stays."""

    def __init__(
        self,
        path: str,
        failures: int = 0,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedQuota | None = None,
    ) -> None:
        """`failures`: wrong keys a minute that are answered for one address; 0 is without limit. `shared`: counts what
        keys use for all gateways; None: this gateway counts alone."""
        self._path = Path(path)
        self._clock = clock
        self._shared = shared
        self._attempts = FailedAttempts(failures, clock)
        self._log_once = LogOnce(log, logging.ERROR)
        self._keys: list[tuple[bytes, Tenant]] = []
        self._stamp: Stamp | None = None
        """The file that the keys were read from."""
        self._wrong: Stamp | None = None
        """A later file that was read and is not valid."""
        self._read(self._stamped())

    async def authenticate(self, call: Credentials) -> Tenant:
        """The tenant of the key in a call's headers, which is charged one request. Raises Unauthenticated for no key or
        an unknown one, ResourceExhausted above the key's rate, and for an address that sent too many wrong keys. A good
        key opens wherever it comes from: an address may be that of many. From here on what the calling task does is the
        tenant's."""
        self._refresh()
        tenant = self._find(_bearer(call))
        if tenant is None:
            self._attempts.fail(call.peer)
            wanted = "send `authorization: Bearer KEY` with a key of this gateway, as HTTP header or metadata"
            raise Unauthenticated(f"{wanted} (commands take it from SLIPSTREAM_API_KEY).")
        TENANT.set(tenant.name)
        await tenant.arrive()
        return tenant

    async def report(self, every_s: float) -> None:
        """Keep the sessions that run here counted, until cancelled; then wait until what they did not use is given
        back."""
        try:
            while True:
                await asyncio.sleep(every_s)
                await asyncio.gather(*(tenant.report() for _, tenant in self._keys))
        finally:
            await asyncio.gather(*(tenant.settle() for _, tenant in self._keys))

    def _find(self, key: str) -> Tenant | None:
        """The tenant of a key. Takes equally long for every key, known or not: each entry is compared in constant
        time."""
        asked, found = digest(key), None
        for kept, tenant in self._keys:
            if hmac.compare_digest(kept, asked):
                found = tenant
        return found

    def _refresh(self) -> None:
        try:
            stamp = self._stamped()
            if stamp == self._wrong:
                return
            if stamp != self._stamp:
                self._read(stamp)
                log.info("the API keys changed; there are %d", len(self._keys))
            self._log_once.log_recovery("the file of API keys can be read again")
        except InvalidArgument as error:
            self._log_once.log_problem(f"the former API keys stay: {error.message}")

    def _stamped(self) -> Stamp:
        try:
            status = self._path.stat()
        except OSError as error:
            raise InvalidArgument(f"GATEWAY_API_KEYS={self._path} cannot be read: {error.strerror}.") from error
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self, stamp: Stamp) -> None:
        try:
            text = self._path.read_bytes()
        except OSError as error:  # a file with this stamp may be readable later
            raise InvalidArgument(f"GATEWAY_API_KEYS={self._path} cannot be read: {error}.") from error
        self._wrong = stamp
        self._parse(text)
        self._stamp, self._wrong = stamp, None

    def _parse(self, text: bytes) -> None:
        try:
            entries = tomllib.loads(text.decode())
        except ValueError as error:
            raise InvalidArgument(f"GATEWAY_API_KEYS={self._path} cannot be read: {error}.") from error
        known = {tenant.name: tenant for _, tenant in self._keys}
        keys = [(*_entry(name, fields), name) for name, fields in entries.items()]
        if len({kept for kept, _, _ in keys}) < len(keys):
            raise InvalidArgument("two API keys are the same; make another one with `slipstream key`.")
        self._keys = []
        for kept, limits, name in keys:
            tenant = known.get(name) or Tenant(name, limits, self._clock, self._shared)
            tenant.change(limits)
            self._keys.append((kept, tenant))


def _entry(name: str, fields: Any) -> tuple[bytes, TenantLimits]:
    """Raises InvalidArgument that names the key and its fault, and never what might be a secret."""
    if not KEY_NAME.fullmatch(name):
        raise InvalidArgument("an API key's name has 1 to 64 of the characters A-Z a-z 0-9 _ -.")
    if not isinstance(fields, dict) or not re.fullmatch("[0-9a-f]{64}", str(fields.get("sha256"))):
        raise InvalidArgument(f"API key {name} has no sha256 of 64 hex digits; see `slipstream key`.")
    given = {field: value for field, value in fields.items() if field != "sha256"}
    known = {field.name for field in dataclasses.fields(TenantLimits)}
    if unknown := sorted(given.keys() - known):
        raise InvalidArgument(f"API key {name}: no such limit: {', '.join(unknown)}; known are {sorted(known)}.")
    for field, value in given.items():
        if wanted := _refused(field, value):
            raise InvalidArgument(f"API key {name}: {field} {wanted}.")
    return bytes.fromhex(fields["sha256"]), TenantLimits(**given)


def _refused(field: str, value: Any) -> str:
    """The error in a limit's value, as a sentence; empty if there is none."""
    if field == "operator":
        return "" if isinstance(value, bool) else "is true or false"
    least, wanted = (LEAST_PRIORITY, f"from {LEAST_PRIORITY} on") if field == "least_priority" else (1, "above zero")
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole and value >= least else f"must be a whole number {wanted}; leave it out for none"


def _bearer(call: Credentials) -> str:
    """The key in the header `authorization`; empty for none, for two, and for one that cannot be a key."""
    value = call.header("authorization")
    known = value[: len(SCHEME)].lower() == SCHEME.lower() and len(value) <= len(SCHEME) + MAX_KEY_CHARACTERS
    return value[len(SCHEME) :].strip() if known else ""


class FailedAttempts:
    """Limits wrong keys to `per_minute` for each origin; 0 is without limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def fail(self, peer: str) -> None:
        """Count one failure. Raises ResourceExhausted, with the time until the next one is answered, for one too
        many."""
        origin, now = origin_of(peer), self._clock()
        bucket = self._buckets.setdefault(origin, TokenBucket(self._per_minute, MINUTE_S, now))
        self._buckets.move_to_end(origin)
        if len(self._buckets) > MOST_ORIGINS:
            self._buckets.popitem(last=False)
        if wait := bucket.wait_s(1, now):
            message = f"too many wrong API keys came from your address; retry in {wait:.1f} s."
            raise ResourceExhausted(message, reason="KEY_ATTEMPTS", retry_s=wait)
        bucket.take(1)
        if bucket.wait_s(1, now):
            log.warning("too many wrong API keys from %s", origin)


def origin_of(peer: str) -> str:
    """The IPv4 address, or IPv6 network, of a peer as gRPC names it (`ipv4:HOST:PORT`, `ipv6:[HOST]:PORT`)."""
    host = unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # such as a socket of this machine
        return "elsewhere"
    if address.version == 4 or address.ipv4_mapped:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
