"""What an API key uses is one count over all gateways, in a real Redis, by its clock."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.api_keys import ApiKeys
from gateway.auth.tenant import Tenant, TenantLimits
from gateway.store.quota import Demand
from gateway.store.redis import Client, RedisQuota
from slipstream.errors import ResourceExhausted, Unavailable
from tests.support.redis_server import redis_process
from tests.support.stores import connected, when_back

LEASE_S = 600.0


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with connected(redis_url) as opened:
        yield opened


def gateways(client: Client, limits: TenantLimits, count: int = 2) -> list[Tenant]:
    """One key, as that many gateways see it; their own clocks stand still."""
    name = uuid.uuid4().hex
    counts = [RedisQuota(client, gateway=f"g{number}", lease_s=LEASE_S) for number in range(count)]
    return [Tenant(name, limits, lambda: 0.0, shared) for shared in counts]


async def refused(tenant: Tenant, prompt: int = 0, output: int = 0) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as refusal:
        await tenant.admit(prompt, output)
    return refusal.value


async def test_all_gateways_together_allow_what_a_key_may_use(client: Client) -> None:
    one, two = gateways(client, TenantLimits(tokens_per_minute=100))
    granted = await one.admit(20, 40)
    error = await refused(two, 0, 60)
    assert error.reason == "KEY_TOKENS" and 0.0 < (error.retry_s or 0.0) <= 12.0  # (60 + 60 - 100) / 100 of a minute
    await two.admit(0, 30)
    granted.end(10)
    await one.settle()
    await two.admit(0, 30)
    assert (await refused(one, 0, 60)).reason == "KEY_TOKENS"


async def test_requests_of_all_gateways_are_counted_together(client: Client) -> None:
    tenants = gateways(client, TenantLimits(requests_per_minute=4))
    for tenant in (*tenants, *tenants):
        await tenant.arrive()
    for tenant in tenants:
        with pytest.raises(ResourceExhausted) as refusal:
            await tenant.arrive()
        assert refusal.value.reason == "KEY_REQUESTS" and 0.0 < (refusal.value.retry_s or 0.0) <= 15.0


async def test_many_requests_at_once_never_get_more_than_the_limit(client: Client) -> None:
    tenants = gateways(client, TenantLimits(sessions=5, tokens_per_minute=10_000))

    async def admitted(tenant: Tenant) -> bool:
        try:
            await tenant.admit(1, 1)
        except ResourceExhausted as error:
            assert error.reason == "KEY_SESSIONS"
            return False
        return True

    assert sum(await asyncio.gather(*(admitted(tenant) for tenant in tenants * 10))) == 5
    assert sum(tenant.sessions for tenant in tenants) == 5


async def test_sessions_of_a_gateway_that_is_gone_are_not_counted_for_ever(client: Client) -> None:
    one, two = gateways(client, TenantLimits(sessions=1))
    await one.admit(1, 1)
    assert (await refused(two)).reason == "KEY_SESSIONS"
    key = f"quota:{{{one.name}}}"
    await client.hincrby(key, "b:g0", -int(1000 * LEASE_S) - 1)  # a server's clock cannot be set
    await one.report()
    assert (await refused(two)).reason == "KEY_SESSIONS"  # it lives
    await client.hincrby(key, "b:g0", -int(1000 * LEASE_S) - 1)
    await two.admit(1, 1)


async def test_a_session_that_ends_leaves_its_place_on_every_gateway(client: Client) -> None:
    one, two = gateways(client, TenantLimits(sessions=1))
    for _ in range(3):
        for here, there in ((one, two), (two, one)):
            granted = await here.admit(1, 1)
            assert (await refused(there)).reason == "KEY_SESSIONS"
            granted.end(1)
            await here.settle()


async def test_a_gateway_that_ends_gives_back_what_its_sessions_did_not_use(client: Client, tmp_path: Path) -> None:
    key = uuid.uuid4().hex
    file = tmp_path / "keys.toml"
    file.write_text(f'{key} = {{ sha256 = "{"0" * 64}", sessions = 1 }}\n')
    (one, two) = (ApiKeys(str(file), shared=RedisQuota(client, gateway=name, lease_s=LEASE_S)) for name in ("g0", "g1"))
    (_, here), (_, there) = one._keys[0], two._keys[0]
    granted = await here.admit(1, 1)
    ending = asyncio.create_task(one.report(1000.0))
    await asyncio.sleep(0)
    granted.end(1)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await there.admit(1, 1)


async def test_each_charge_is_one_round_trip_and_none_where_nothing_is_limited(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[str] = []
    charge = RedisQuota.charge

    async def counted(quota: RedisQuota, key: str, demand: Demand) -> tuple[str, float]:
        trips.append(key)
        return await charge(quota, key, demand)

    monkeypatch.setattr(RedisQuota, "charge", counted)
    for limits, expected in ((TenantLimits(tokens_per_minute=100, sessions=2), 3), (TenantLimits(prompt_tokens=9), 0)):
        trips.clear()
        (tenant,) = gateways(client, limits, 1)
        await tenant.arrive()
        (await tenant.admit(1, 1)).end(1)
        await tenant.settle()
        assert len(trips) == expected


async def test_while_the_store_is_away_each_gateway_counts_alone_and_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gateway.auth.tenant")
    with redis_process(tmp_path) as server:
        async with connected(server.url, reply_timeout_s=0.2) as client:
            one, two = gateways(client, TenantLimits(tokens_per_minute=100))
            await one.admit(0, 50)
            server.kill()
            assert (await refused(one, 0, 60)).reason == "KEY_TOKENS"  # it knows what was used here
            await two.admit(0, 60)
            await two.admit(0, 40)
            assert (await refused(two, 0, 1)).reason == "KEY_TOKENS"
            assert [each.levelno for each in caplog.records] == [logging.WARNING]
            server.start()
            three, four = gateways(client, TenantLimits(tokens_per_minute=100))
            async with asyncio.timeout(60):
                while "together again" not in caplog.text:
                    await asyncio.sleep(0.05)
                    await three.charge(1)
                    three._tokens.give_back(1)
            await four.admit(0, 50)
            assert (await refused(three, 0, 60)).reason == "KEY_TOKENS"


async def test_a_store_that_does_not_answer_holds_up_one_request_a_second_at_most(tmp_path: Path) -> None:
    now = [0.0]
    with redis_process(tmp_path) as server:
        async with connected(server.url, reply_timeout_s=0.1) as client:
            quota = RedisQuota(client, gateway="g", lease_s=1.0, clock=lambda: now[0])
            asked = 0
            run = quota._script

            async def counted(**words: object) -> object:
                nonlocal asked
                asked += 1
                return await run(**words)  # type: ignore[arg-type]

            quota._script = counted  # type: ignore[assignment]
            server.freeze()
            for _ in range(10):
                with pytest.raises(Unavailable):
                    await quota.charge("k", Demand())
            assert asked == 1
            now[0] = 1.0
            with pytest.raises(Unavailable):
                await quota.charge("k", Demand())
            assert asked == 2
            server.thaw()


async def test_a_store_that_stalls_for_a_moment_locks_no_key_out_of_its_quota(tmp_path: Path) -> None:
    """What was sent meanwhile is carried out when it wakes, though the gateways counted for themselves by then."""
    limits = TenantLimits(sessions=3, tokens_per_minute=900, requests_per_minute=100)
    with redis_process(tmp_path) as server:
        async with connected(server.url) as client:
            here, there = gateways(client, limits)
            running = await here.admit(0, 1)
            await there.arrive()
            server.freeze()
            for tenant in (here, there):
                for _ in range(3 - tenant.sessions):  # the first waits for the store in vain
                    (await tenant.admit(0, 300)).end(0)
                await tenant.settle()
            running.end(1)
            await here.settle()
            server.thaw()
            await when_back(lambda: charged(here))
            await here.report()  # as a gateway does now and then
            await when_back(lambda: charged(there))
            await there.report()
            for tenant in (here, there):
                granted = [await tenant.admit(0, 290) for _ in range(3)]
                assert [each.reason for each in [await refused(here), await refused(there)]] == ["KEY_SESSIONS"] * 2
                for each in granted:
                    each.end(0)
                await tenant.settle()


async def charged(tenant: Tenant) -> None:
    """Raises Unavailable while the store does not count a charge."""
    if not await tenant.charge(1):
        raise Unavailable("away")


async def test_a_charge_is_carried_out_once_however_often_and_late_it_is_sent(client: Client) -> None:
    """In the order in which the store receives them; each has the number that its gateway gave it."""
    key, most = uuid.uuid4().hex, (10, 100, 2)
    quota = RedisQuota(client, gateway="g", lease_s=LEASE_S)
    sent: list[dict[str, Any]] = []
    run = quota._script

    async def kept(**words: Any) -> Any:
        sent.append(words)
        return await run(**words)

    quota._script = kept  # type: ignore[assignment]

    async def state() -> tuple[int, int, int]:
        fields = await client.hgetall(f"quota:{{{key}}}")
        requests, tokens, sessions = (round(float(fields[name])) for name in (b"requests", b"tokens", b"n:g"))
        return requests, tokens, sessions

    assert await quota.charge(key, Demand(1, 60, 1, 1, 60, 1, *most)) == ("", 0.0)
    assert await state() == (1, 60, 1)
    assert await run(**sent[0]) == [b"", 0] and await state() == (1, 60, 1)  # repeated
    refusal = await quota.charge(key, Demand(1, 60, 1, 2, 120, 2, *most))
    assert refusal[0] == "tokens" and await state() == (1, 60, 1)
    assert (await run(**sent[1]))[0] == b"tokens"
    await quota.charge(key, Demand(0, 0, 0, 1, 20, 0, *most))  # 40 and the session are given back
    assert await state() == (1, 20, 0)
    for late in sent[:2]:
        assert (await run(**late))[0] == b"stale" and await state() == (1, 20, 0)
    # A charge that was never answered: its gateway does not count it, and the next report takes it back.
    await quota.charge(key, Demand(1, 50, 1, 2, 70, 1, *most))
    assert await state() == (2, 70, 1)
    await quota.charge(key, Demand(0, 0, 0, 1, 20, 0, *most))
    assert await state() == (1, 20, 0)
    await client.delete(f"quota:{{{key}}}")  # a store that lost everything begins with this charge alone
    await quota.charge(key, Demand(1, 30, 1, 2, 50, 1, *most))
    assert await state() == (1, 30, 1)
