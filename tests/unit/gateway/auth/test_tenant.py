"""What one key may use: rates on a clock of the test's own, room for sessions, and whose sessions are whose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.api_keys import ApiKeys
from gateway.auth.tenant import OPEN, Tenant, TenantLimits, check_operator
from slipstream.errors import InvalidArgument, PermissionDenied, ResourceExhausted


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_default_output_leaves_a_keys_minute_room_for_other_requests() -> None:
    tenant = Tenant("alice", TenantLimits(tokens_per_minute=800, max_tokens=300), Clock())
    assert tenant.most_output(None, 8192) == 100
    assert tenant.most_output(None, 16) == 16
    assert tenant.most_output(250, 16) == 250
    assert Tenant("bob", TenantLimits(tokens_per_minute=3), Clock()).most_output(None, 8192) == 1
    assert Tenant("eve", TenantLimits(max_tokens=300), Clock()).most_output(None, 8192) == 300


async def test_requests_above_the_rate_get_a_retry_delay() -> None:
    clock = Clock()
    tenant = Tenant("alice", TenantLimits(requests_per_minute=2), clock)
    await tenant.arrive()
    await tenant.arrive()
    with pytest.raises(ResourceExhausted) as refusal:
        await tenant.arrive()
    assert refusal.value.retry_s == pytest.approx(30.0) and refusal.value.reason == "KEY_REQUESTS"
    clock.now += 30.0
    await tenant.arrive()


async def test_tokens_are_set_aside_and_what_was_not_used_comes_back() -> None:
    tenant = Tenant("alice", TenantLimits(tokens_per_minute=100), Clock())
    grant = await tenant.admit(prompt=20, output=70)
    with pytest.raises(ResourceExhausted) as refusal:
        await tenant.admit(prompt=10, output=30)
    assert refusal.value.retry_s == pytest.approx(18.0)
    grant.end(output=30)
    grant.end(output=0)  # nothing more: it has ended
    await tenant.admit(prompt=20, output=30)
    with pytest.raises(ResourceExhausted):
        await tenant.admit(prompt=1, output=1)


async def test_a_request_above_a_whole_minutes_limit_is_refused_as_invalid() -> None:
    tenant = Tenant("alice", TenantLimits(tokens_per_minute=100), Clock())
    with pytest.raises(InvalidArgument, match="101 tokens"):
        await tenant.admit(prompt=1, output=100)
    assert tenant.sessions == 0


async def test_sessions_at_once_are_counted_until_they_end() -> None:
    tenant = Tenant("alice", TenantLimits(sessions=1), Clock())
    grant = await tenant.admit(1, 1)
    with pytest.raises(ResourceExhausted, match="all the sessions"):
        await tenant.admit(1, 1)
    grant.end(1)
    await tenant.admit(1, 1)


def test_sizes_above_the_keys_are_refused_and_defaults_fit_in() -> None:
    tenant = Tenant("alice", TenantLimits(prompt_tokens=10, max_tokens=5), Clock())
    tenant.check_prompt(10)
    assert (tenant.most_output(None, 256), tenant.most_output(5, 256)) == (5, 5)
    with pytest.raises(InvalidArgument):
        tenant.check_prompt(11)
    with pytest.raises(InvalidArgument):
        tenant.most_output(6, 256)
    assert OPEN.most_output(None, 256) == 256 and OPEN.most_output(10**9, 256) == 10**9


async def test_changing_a_limit_keeps_the_usage_so_far() -> None:
    clock = Clock()
    tenant = Tenant("alice", TenantLimits(requests_per_minute=2), clock)
    await tenant.arrive()
    tenant.change(TenantLimits(requests_per_minute=3))
    await tenant.arrive()
    await tenant.arrive()
    with pytest.raises(ResourceExhausted):
        await tenant.arrive()
    tenant.change(TenantLimits())
    await tenant.arrive()


@given(one=st.tuples(st.text(max_size=8), st.text(max_size=8)), two=st.tuples(st.text(max_size=8), st.text(max_size=8)))
def test_only_the_same_key_with_the_same_salt_shares_caches(one: tuple[str, str], two: tuple[str, str]) -> None:
    names = [Tenant(name.replace("\0", "0") or "x", TenantLimits()) for name, _ in (one, two)]
    same = (names[0].name, one[1]) == (names[1].name, two[1])
    assert (names[0].salt(one[1]) == names[1].salt(two[1])) is same
    assert len(names[0].salt(one[1]).encode()) <= 64
    assert OPEN.salt("mine") == "mine"


def test_calls_about_all_tenants_are_for_operators_alone() -> None:
    with pytest.raises(PermissionDenied) as refusal:
        check_operator(Tenant("alice", TenantLimits()))
    assert refusal.value.reason == "OPERATOR" and "alice" in refusal.value.message
    check_operator(Tenant("root", TenantLimits(operator=True)))
    check_operator(OPEN)  # without keys everybody may do everything


@pytest.mark.parametrize(
    ("line", "operator"), [("", False), (", operator = true", True), (", operator = false", False)]
)
def test_a_key_is_marked_as_an_operator_s(tmp_path: Path, line: str, operator: bool) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{"0" * 64}"{line} }}\n')
    assert [tenant.limits.operator for _, tenant in ApiKeys(str(file))._keys] == [operator]


def test_an_operator_is_marked_by_true_or_false(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{"0" * 64}", operator = 1 }}\n')
    with pytest.raises(InvalidArgument, match="operator is true or false"):
        ApiKeys(str(file))
