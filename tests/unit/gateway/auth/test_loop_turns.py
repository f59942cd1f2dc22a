"""One tenant's many requests hold up another one's on the event loop by a callback for each of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.auth.loop_turns import OWN, PASS, TENANT, ReadyCallbacks, take_turns

REQUESTS, STEPS = 256, 20


@contextmanager
def loop_of(turns: bool) -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    if turns:
        take_turns(loop)
    try:
        yield loop
    finally:
        loop.close()


async def request(tenant: str, done: list[str], steps: int = STEPS) -> None:
    if tenant:
        TENANT.set(tenant)
    for _ in range(steps):
        await asyncio.sleep(0)
        done.append(tenant)


def steps_beside_many(*, turns: bool) -> int:
    """Steps of 256 requests of one tenant while another one's request takes all of its own."""

    async def both() -> int:
        done: list[str] = []
        many = [asyncio.create_task(request("many", done, 10 * STEPS)) for _ in range(REQUESTS)]
        while done.count("many") < REQUESTS:
            await asyncio.sleep(0)
        before = len(done)
        await asyncio.create_task(request("one", done))
        found = done[before:].count("many")
        for task in many:
            task.cancel()
        await asyncio.wait(many)
        return found

    with loop_of(turns) as loop:
        return loop.run_until_complete(both())


def test_one_request_beside_many_of_another_tenant_waits_for_one_callback_of_theirs_each_time() -> None:
    assert steps_beside_many(turns=False) >= (STEPS - 1) * REQUESTS
    assert steps_beside_many(turns=True) <= STEPS + PASS


def test_a_socket_is_looked_at_while_many_callbacks_are_ready() -> None:
    async def main() -> int:
        done: list[str] = []
        many = [asyncio.create_task(request("many", done)) for _ in range(REQUESTS)]
        while not done:
            await asyncio.sleep(0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.send(b"x")
            before = len(done)
            await asyncio.get_running_loop().sock_recv(ours, 1)
            reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(ours, 1))
            await asyncio.sleep(0)
            theirs.send(b"y")
            await reading
        found = len(done) - before
        await asyncio.wait(many)
        return found

    with loop_of(True) as loop:
        assert loop.run_until_complete(main()) <= 8 * PASS


def test_each_tenant_s_callbacks_run_in_their_order_and_none_is_lost() -> None:
    ran: list[tuple[str, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            for tenant in ("a", "b", ""):
                token = TENANT.set(tenant)
                loop.call_soon(ran.append, (tenant, number))
                TENANT.reset(token)
        await asyncio.sleep(0)
        while len(ran) < 150:
            await asyncio.sleep(0)

    with loop_of(True) as loop:
        loop.run_until_complete(main())
    for tenant in ("a", "b", ""):
        assert [number for name, number in ran if name == tenant] == list(range(50))


def test_callbacks_of_no_tenant_starve_none() -> None:
    ready = ReadyCallbacks()
    loop = asyncio.new_event_loop()
    own = [asyncio.Handle(print, (), loop) for _ in range(100)]
    TENANT.set("a")
    theirs = asyncio.Handle(print, (), loop)
    for handle in (*own, theirs):
        ready.append(handle)
    assert [ready.popleft() for _ in range(OWN + 1)] == [*own[:OWN], theirs]
    assert len(ready) == PASS
    loop.close()


def test_what_was_ready_before_runs() -> None:
    ran: list[int] = []
    loop = asyncio.new_event_loop()
    loop.call_soon(ran.append, 1)
    take_turns(loop)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert ran == [1]


@pytest.fixture(autouse=True)
def nobodys() -> Iterator[None]:
    token = TENANT.set("")
    yield
    TENANT.reset(token)
