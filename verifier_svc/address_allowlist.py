"""Addresses that a verifier may dial. Gateways name drafters by address, and an attacker who takes a gateway over must
not be able to make the verifier connect to every host of the network."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import InvalidArgument, PermissionDenied
from slipstream.proposers.registry import method_in_verifier

ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
PATTERN = re.compile(
    r"(?P<host>[A-Za-z0-9._*-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}(/[0-9]{1,3})?\]?):(?P<port>[0-9]{1,5}|\*)"
)
NUMBERS = re.compile("[0-9.*]*[0-9][0-9.*]*")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class AddressPattern:
    """HOST:PORT. The host is a network (10.1.0.0/16, [fd00::/8]) or a name, in which `*` stands for any letters of one
    label: `*` of `10.1.*` would else fit a name that anyone can register. The port may be `*`."""

    network: Network | None
    name: re.Pattern[str]
    port: str

    def fits(self, host: str, port: str) -> bool:
        if self.port not in ("*", port):
            return False
        address = _address(host)
        if address is None:
            return self.network is None and bool(self.name.fullmatch(host.lower()))
        return self.network is not None and address in self.network


class AddressAllowlist:
    """Patterns of drafters' addresses; without any, all are allowed. Raises InvalidArgument for one that cannot be
    read."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [_pattern(text) for text in patterns]

    def check(self, address: str) -> None:
        """Raises InvalidArgument for what is not HOST:PORT (gRPC would dial `unix:` and the like), PermissionDenied for
        a place that is not among the patterns. A drafter inside the verifier is not dialled."""
        if method_in_verifier(address):
            return
        parts = ADDRESS.fullmatch(address)
        if parts is None:
            raise InvalidArgument("a drafter's address is HOST:PORT.", reason="DRAFTER_ADDRESS")
        if self._patterns and not any(pattern.fits(parts["host"], parts["port"]) for pattern in self._patterns):
            raise PermissionDenied(
                f"{address} is no allowed address of drafters; name another, or add it to VERIFIER_DRAFTERS_ALLOWED.",
                reason="DRAFTER_ADDRESS",
            )


def _pattern(text: str) -> AddressPattern:
    parts = PATTERN.fullmatch(text)
    if parts is None:
        raise InvalidArgument(
            f"VERIFIER_DRAFTERS_ALLOWED holds {text!r}; write HOST:PORT, with * or a network as host."
        )
    host = parts["host"]
    name = re.compile(re.escape(host.lower()).replace(r"\*", "[a-z0-9_-]*"))
    try:
        network: Network | None = ipaddress.ip_network(host.strip("[]"))
    except ValueError as error:
        if "/" in host or NUMBERS.fullmatch(host):
            raise InvalidArgument(f"VERIFIER_DRAFTERS_ALLOWED holds {text!r}, which is no network: {error}.") from error
        network = None
    return AddressPattern(network, name, parts["port"])


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
