"""Where a verifier may dial: what is no HOST:PORT never, and with patterns only what fits one of them."""

from __future__ import annotations

import pytest

from slipstream.errors import InvalidArgument, PermissionDenied
from verifier_svc.address_allowlist import AddressAllowlist
from verifier_svc.config import VerifierConfig


@pytest.mark.parametrize(
    "address",
    [
        "",
        "drafter",
        "drafter:",
        ":50061",
        "unix:/run/docker.sock",
        "unix-abstract:x",
        "dns://10.0.0.1/drafter:50061",
        "ipv4:127.0.0.1:50061",
        "vsock:1:2",
        "http://metadata:80",
        "user@drafter:50061",
        "drafter:50061/path",
        "drafter:50061\n",
        "dräfter:50061",
        "[::1%eth0]:50061",
        "drafter:123456",
    ],
)
def test_an_invalid_host_and_port_is_never_dialled(address: str) -> None:
    with pytest.raises(InvalidArgument):
        AddressAllowlist().check(address)


@pytest.mark.parametrize("address", ["drafter-0.drafters:50061", "10.1.2.3:1", "[::1]:50061", "localhost:65535"])
def test_without_patterns_any_host_and_port_is(address: str) -> None:
    AddressAllowlist().check(address)


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        ("drafter:50061", ["drafter:50061", "DRAFTER:50061"], ["drafter:50062", "drafter.x:50061", "xdrafter:50061"]),
        (
            "drafter-*.drafters:50061",
            ["drafter-7.drafters:50061"],
            ["drafter-7.x.drafters:50061", "drafter-7.drafters.x:1"],
        ),
        ("10.1.0.0/16:50061", ["10.1.255.1:50061"], ["10.2.0.1:50061", "10.1.0.1:80", "10.1.0.1.evil.example:50061"]),
        ("127.0.0.1:*", ["127.0.0.1:1", "127.0.0.1:65535"], ["127.0.0.2:1", "localhost:1"]),
        ("[fd00::/8]:50061", ["[fd12::1]:50061"], ["[fe80::1]:50061", "drafter:50061"]),
        ("*:50061", ["drafter:50061"], ["a.b:50061", "169.254.169.254:50061"]),
    ],
)
def test_with_patterns_only_what_fits_one(pattern: str, fits: list[str], others: list[str]) -> None:
    places = AddressAllowlist(["nobody:1", pattern])
    for address in fits:
        places.check(address)
    for address in others:
        with pytest.raises(PermissionDenied):
            places.check(address)


@pytest.mark.parametrize(
    "pattern", ["", "drafter", "10.1.*:50061", "10.1.0.0/40:1", "10.1.0.1/16:1", "http://x:1", "a:b"]
)
def test_a_pattern_that_cannot_be_read_stops_the_start(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="VERIFIER_DRAFTERS_ALLOWED"):
        VerifierConfig(model="x", drafters_allowed=(pattern,))


def test_a_drafter_inside_the_verifier_is_at_no_address_and_a_host_called_verifier_is() -> None:
    allowlist = AddressAllowlist(["10.0.0.1:*"])
    allowlist.check("verifier:ngram")
    with pytest.raises(PermissionDenied):
        allowlist.check("verifier:50061")
    with pytest.raises(InvalidArgument):
        AddressAllowlist().check("unix:ngram")
