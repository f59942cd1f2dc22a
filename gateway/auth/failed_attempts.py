"""Failed attempts to come in, by where they come from."""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from gateway.auth.tenant import MINUTE_S
from slipstream.concurrency import TokenBucket
from slipstream.errors import ResourceExhausted

log = logging.getLogger(__name__)

MOST_ORIGINS = 4096
"""That are remembered: the one that failed longest ago is forgotten for a new one."""
NETWORK_BITS = 64
"""Of an IPv6 address: the rest of it is its owner's to choose."""


class FailedAttempts:
    """Each origin may fail so often a minute; 0 is without limit."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def fail(self, peer: str) -> None:
        """One more. Raises ResourceExhausted, with the time until the next one is answered, for one too many."""
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
    """Of a peer as gRPC names it (`ipv4:HOST:PORT`, `ipv6:[HOST]:PORT`): its address, or its network."""
    host = unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a socket of this machine, say
        return "elsewhere"
    if address.version == 4 or address.ipv4_mapped:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
