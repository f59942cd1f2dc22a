"""Names under which web pages may reach a gateway that asks for no key and listens to its own machine alone.

A page of anybody's can name its own host 127.0.0.1 (DNS rebinding): to the browser the gateway is then the page's own
server, and CORS protects nothing. The header Host still has the page's name, which no page can change.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from slipstream.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class LocalHosts:
    allowed: frozenset[str]
    """Names besides those of this machine."""

    def check(self, header: str) -> None:
        """Raises PermissionDenied for a Host that a web page from elsewhere may have as its own."""
        name = _name(header)
        # A name without dots is one of this network: nobody's page has it.
        if "." not in name or name.endswith(".localhost") or name in self.allowed or is_address(name):
            return
        raise PermissionDenied(
            "This gateway has no keys, so it answers to this machine's own names alone; list the page's origin in "
            "GATEWAY_HTTP_ORIGINS, or set GATEWAY_API_KEYS.",
            reason="HOST",
        )


def local_hosts(listen: str, origins: Sequence[str]) -> LocalHosts | None:
    """None for a gateway that listens to other machines too, or that any page may use."""
    name = _name(listen)
    local = name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)
    if not local or "*" in origins:
        return None
    return LocalHosts(frozenset(filter(None, (urlsplit(origin).hostname for origin in origins))))


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """HOST of HOST or HOST:PORT, in lower case; an address in brackets without them."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()
