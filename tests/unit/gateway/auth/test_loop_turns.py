"""One tenant's many requests hold up another one's on the event loop by a callback for each of its own."""

from __future__ import annotations

import ast
import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.auth import loop_turns
from gateway.auth.loop_turns import FEW, OWN, PASS, TENANT, FairLoop, ReadyCallbacks, WaitingCallback

REQUESTS, STEPS = 256, 20


@contextmanager
def loop_of(turns: bool) -> Iterator[asyncio.AbstractEventLoop]:
    loop = FairLoop() if turns else asyncio.new_event_loop()
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
    for number in range(100):
        ready.append("", number)
    ready.append("a", "theirs")
    assert [ready.popleft() for _ in range(OWN + 1)] == [*range(OWN), "theirs"]
    assert len(ready) == 100 - OWN


def test_sockets_are_read_a_few_at_a_time_and_each_before_any_again() -> None:
    read: list[int] = []
    passes: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(5 * FEW)]
        for number, (ours, theirs) in enumerate(pairs):
            ours.setblocking(False)
            theirs.send(b"x" * 3)
            loop.add_reader(ours, lambda ours=ours, number=number: (ours.recv(1), read.append(number)))
        while len(read) < 3 * len(pairs):
            before = len(read)
            await asyncio.sleep(0)
            passes.append(len(read) - before)
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()

    with loop_of(True) as loop:
        loop.run_until_complete(main())
    assert max(passes) <= FEW
    for turn in range(3):
        assert sorted(read[turn * 5 * FEW :][: 5 * FEW]) == list(range(5 * FEW))


def test_a_socket_that_was_closed_before_its_turn_is_not_read() -> None:
    read: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(3 * FEW)]

        def take(number: int) -> None:
            read.append(number)
            for ours, _ in pairs:
                loop.remove_reader(ours)

        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            loop.add_reader(ours, take, number)
        for _ in range(10):
            await asyncio.sleep(0)
        for pair in pairs:
            for each in pair:
                each.close()

    with loop_of(True) as loop:
        loop.run_until_complete(main())
    assert 1 <= len(read) <= FEW


def test_a_cancelled_callback_does_not_run_and_one_that_fails_is_reported() -> None:
    ran: list[int] = []
    failed: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
        loop.call_soon(ran.append, 1).cancel()
        loop.call_soon(int, "x")
        loop.call_soon(ran.append, 2)
        await asyncio.sleep(0.01)

    with loop_of(True) as loop:
        loop.run_until_complete(main())
    assert ran == [2] and [type(each) for each in failed] == [ValueError]


def test_nothing_private_to_asyncio_is_touched() -> None:
    source = ast.parse(Path(loop_turns.__file__).read_text("utf-8"))
    own = {each.name for each in ast.walk(source) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    own |= {
        each.attr for each in ast.walk(source) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    private = {each.attr for each in ast.walk(source) if isinstance(each, ast.Attribute) and each.attr[0] == "_"}
    assert {name for name in private if not name.startswith("__")} <= own
    base, fair = asyncio.new_event_loop(), FairLoop()
    for mine, theirs in ((vars(FairLoop), dir(base)), (vars(WaitingCallback), dir(asyncio.Handle))):
        assert not {name for name in mine if name[0] == "_" and not name.startswith("__")} & set(theirs)
    assert vars(fair).keys() - vars(base).keys() == {"_turns", "_turns_scheduled", "_nobody"}
    base.close()
    fair.close()


@pytest.fixture(autouse=True)
def nobodys() -> Iterator[None]:
    token = TENANT.set("")
    yield
    TENANT.reset(token)
