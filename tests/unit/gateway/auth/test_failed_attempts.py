"""Failed attempts are counted where they come from, within bounds."""

from __future__ import annotations

import pytest

from gateway.auth.api_keys import MOST_ORIGINS, FailedAttempts, origin_of
from slipstream.errors import ResourceExhausted


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_origin_with_too_many_failures_gets_a_retry_delay_and_no_other_one_does() -> None:
    clock = Clock()
    attempts = FailedAttempts(2, clock)
    for port in (1, 2):
        attempts.fail(f"ipv4:10.0.0.1:{port}")
    with pytest.raises(ResourceExhausted) as refusal:
        attempts.fail("ipv4:10.0.0.1:3")
    assert refusal.value.reason == "KEY_ATTEMPTS" and refusal.value.retry_s == pytest.approx(30.0)
    attempts.fail("ipv4:10.0.0.2:1")
    clock.now += 30.0
    attempts.fail("ipv4:10.0.0.1:4")


def test_only_so_many_origins_are_remembered_and_the_latest_ones_stay() -> None:
    attempts = FailedAttempts(1, Clock())
    for number in range(MOST_ORIGINS + 10):
        attempts.fail(f"ipv6:%5B2001:db8:0:{number:x}::1%5D:50051")
        assert len(attempts._buckets) <= MOST_ORIGINS
    with pytest.raises(ResourceExhausted):
        attempts.fail(f"ipv6:%5B2001:db8:0:{MOST_ORIGINS + 9:x}::2%5D:50051")
    attempts.fail("ipv6:%5B2001:db8:0:0::1%5D:50051")


def test_without_a_limit_no_attempt_is_refused() -> None:
    attempts = FailedAttempts(0, Clock())
    for _ in range(1000):
        attempts.fail("ipv4:10.0.0.1:1")


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        ("ipv4:127.0.0.1:50051", "127.0.0.1"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:1", "10.1.2.3"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("unix:/run/slipstream.sock", "elsewhere"),
        ("", "elsewhere"),
    ],
)
def test_an_origin_is_an_address_or_the_network_that_belongs_to_one_owner(peer: str, origin: str) -> None:
    assert origin_of(peer) == origin
