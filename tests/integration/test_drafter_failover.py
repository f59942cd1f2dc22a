"""A session whose drafter fails goes on, gets another one from its gateway, and says what it would have said anyway.

Gateway, verifier and drafters are the real ones, over real gRPC in one process; only their models are emulated.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, GatewayServer, running
from gateway.routing.breaker import BreakerState
from gateway.routing.drafters import DrafterWorker
from gateway.routing.router import DrafterRequirements
from gateway.sessions import drafter_assignment
from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2_grpc
from tests.support.fleet import drafter, emulated_text, until, verifier
from tests.support.follower import Follower
from tests.support.hostile_drafter import Answer, HostileDrafter, frame, hostile, refusal
from verifier_svc.verifier import VerifierServer

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
TARGET = "emulated:base_ms=4"
SLOWER = "emulated:base_ms=20"
DRAFT = "emulated:acceptance=0.9"
SILENCE_S = 0.4
PROMPT = [7, 8, 9]
LONG = 50_000
KV = 1_000_000
MODEL = proto_conversion.model_to_proto(open_engine(DRAFT, kv_tokens=KV).model)


class Run(Follower):
    """A long one."""

    def __init__(self, stub: Any, prompt: list[int], **speculation: Any) -> None:
        super().__init__(stub, prompt, LONG, **speculation)

    async def speculates(self, more: int = 50) -> None:
        """Return once `more` candidates were verified from now on."""
        await until(lambda: bool(self.session_id) or self.reading.done())
        async with asyncio.timeout(60):
            enough = await self.drafted() + more
            while await self.drafted() < enough:
                assert not self.reading.done(), self.reading.exception()
                await asyncio.sleep(0.05)  # each answer holds the whole text

    async def advances(self, tokens: int = 100) -> None:
        enough = len(self.tokens) + tokens
        await until(lambda: len(self.tokens) >= enough or self.reading.done())
        assert not self.reading.done(), self.reading.exception()

    async def end(self) -> None:
        await super().end()
        assert self.tokens


def speculating(engine: str = TARGET) -> AbstractAsyncContextManager[VerifierServer]:
    """A verifier that goes on speculating where that does not pay, as on a machine whose cores all parts here share."""
    return verifier(open_engine(engine, kv_tokens=KV), silence_s=SILENCE_S, always_speculate=True, max_wait_s=0.05)


class Place:
    """Builds a system for one test and ends it after it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.gateway: GatewayServer
        self.stub: Any

    async def verifier(self, engine: str = TARGET) -> VerifierServer:
        return await self.stack.enter_async_context(speculating(engine))

    async def friend(self, engine: Any = None, **options: Any) -> str:
        return await self.stack.enter_async_context(drafter(engine or open_engine(DRAFT, kv_tokens=KV), **options))

    async def enemy(self, answer: Answer) -> HostileDrafter:
        return await self.stack.enter_async_context(hostile(answer, MODEL))

    async def open(self, *verifiers: VerifierServer, **drafters: str) -> None:
        config = GatewayConfig(
            verifiers=tuple(server.address for server in verifiers),
            tokenizer=TOKENIZER,
            listen="127.0.0.1:0",
            drafters=tuple(f"{name}={address}" for name, address in drafters.items()),
            breaker_cool_down_s=0.5,
            breaker_longest_cool_down_s=2.0,
            grace_s=0.0,
        )
        world = GatewayDependencies(random.Random(7).getrandbits)
        self.gateway = await self.stack.enter_async_context(running(config, world))
        await self.gateway.ready()
        while not all(known.present for known in self.gateway.router.drafters):
            await self.gateway.router.changes.wait()
        line = await self.stack.enter_async_context(channel(self.gateway.address))
        self.stub = gateway_pb2_grpc.GatewayServiceStub(line)

    def run(self, first: int = 7, **speculation: Any) -> Run:
        return Run(self.stub, [first, *PROMPT[1:]], **speculation)

    def drafter(self, name: str) -> DrafterWorker:
        found = self.gateway.router.drafter(name)
        assert found is not None
        return found

    def state(self, name: str) -> BreakerState:
        return self.drafter(name).breaker.state(self.gateway.router.clock())


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(drafter_assignment, "LONGEST_ABSENCE_S", 2.0)
    async with AsyncExitStack() as stack:
        yield Place(stack)


def names_of(server: VerifierServer) -> list[set[str]]:
    """Which drafters each session on a verifier has, by the gateway's names."""
    sessions = server.service.sources._of_session
    return [
        {found.name for member in members if (found := member._by_session.get(session)) is not None}
        for session, members in sessions.items()
    ]


def on_open(*responses: Callable[[Any], Any]) -> Answer:
    return lambda _, command: [response(command) for response in responses] if command.HasField("open") else []


class Liar:
    """Sends tokens that do not exist for as long as it `lies`, and then the truth."""

    def __init__(self) -> None:
        self.lies = True
        self._texts: dict[int, list[int]] = {}

    def __call__(self, _: HostileDrafter, command: Any) -> Any:
        if command.HasField("open"):
            self._texts[command.session] = emulated_text(list(command.open.prefix.token_ids[: len(PROMPT)]), 4000)
        if command.WhichOneof("command") not in ("open", "commit"):
            return []
        if self.lies:
            return [frame(command, [256])]
        base = frame(command, []).candidates[0].base_length - len(PROMPT)
        return [frame(command, self._texts[command.session][base : base + 3])]


def flood(_: HostileDrafter, command: Any) -> Any:
    while command.HasField("open"):
        yield frame(command, [1] * 50)


FAULTS: dict[str, Answer] = {
    "a token out of range": on_open(lambda c: frame(c, [256])),
    "a base from the future": on_open(lambda c: frame(c, [1], base_length=100_000)),
    "a flood": flood,
    "broken numbers": on_open(lambda c: refusal(c, 13)),
    "a refusal": on_open(lambda c: refusal(c, 8)),
    "a broken stream": on_open(lambda c: ValueError("boom")),
    "silence": on_open(),
}


@pytest.mark.mended_faults
@pytest.mark.parametrize("answer", FAULTS.values(), ids=FAULTS.keys())
async def test_a_drafter_that_fails_a_session_is_replaced_by_another_one_of_its_method(
    place: Place, answer: Answer
) -> None:
    server = await place.verifier()
    enemy, friend = await place.enemy(answer), await place.friend()
    await place.open(server, enemy=enemy.address, friend=friend)
    place.drafter("friend").users += 1  # so that the session begins with the other one
    session = place.run()
    await until(lambda: bool(enemy.kinds("open")))
    await session.speculates()
    await until(lambda: names_of(server) == [{"friend"}])
    await session.end()


@pytest.mark.mended_faults
async def test_after_invalid_frames_a_drafter_gets_one_session_at_a_time_until_its_breaker_closes(place: Place) -> None:
    liar = Liar()
    server, enemy = await place.verifier(SLOWER), await place.enemy(liar)
    await place.open(server, enemy=enemy.address)
    first = place.run()
    await until(lambda: place.state("enemy") is BreakerState.OPEN)
    assert place.gateway.router.choose_drafters(MODEL, DrafterRequirements()) == []
    assert place.gateway.router.choose_drafters(MODEL, DrafterRequirements(tenant="another")), (
        "it has not failed that one"
    )
    sessions = [first, *(place.run(number) for number in range(10, 16))]
    while len(enemy.kinds("open")) < 4:  # three tries failed, one at a time, ever later
        assert sum(map(len, names_of(server))) <= 1
        await asyncio.sleep(0.002)
    liar.lies = False
    await until(lambda: place.state("enemy") is BreakerState.CLOSED)
    await until(lambda: sum(map(len, names_of(server))) == len(sessions))
    for session in sessions:
        await session.speculates(5)
        await session.end()
    assert place.drafter("enemy").users == 0


async def test_all_sessions_of_a_dead_drafter_move_and_the_next_ones_do_not_try_it(place: Place) -> None:
    server, friend = await place.verifier(SLOWER), await place.friend()
    async with AsyncExitStack() as mortal:
        address = await mortal.enter_async_context(drafter(open_engine(DRAFT, kv_tokens=KV)))
        await place.open(server, mortal=address, friend=friend)
        place.drafter("friend").users += 100
        sessions = [place.run(number) for number in range(8)]
        for session in sessions:
            await session.speculates(10)
        await until(lambda: names_of(server) == [{"mortal"}] * 8)
    for session in sessions:
        await session.speculates()
    await until(lambda: names_of(server) == [{"friend"}] * 8)
    await until(lambda: not place.drafter("mortal").present)
    late = place.run(9)
    await late.speculates()
    for session in [*sessions, late]:
        await session.end()


async def test_the_only_drafter_is_used_again_after_its_restart(place: Place) -> None:
    server = await place.verifier()
    async with AsyncExitStack() as mortal:
        address = await mortal.enter_async_context(drafter(open_engine(DRAFT, kv_tokens=KV)))
        await place.open(server, only=address)
        session = place.run()
        await session.speculates()
    await until(lambda: not place.drafter("only").present)
    await session.advances()
    async with drafter(open_engine(DRAFT, kv_tokens=KV), listen=address):
        await session.speculates()
        await session.end()


class BrokenEngine(EmulatedEngine):
    """A draft model whose weights are NaN."""

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        return ModelOutput(torch.full_like(super().forward(segments).logits, torch.nan))


class StuckEngine(EmulatedEngine):
    """Computes until it is told to hang; the loop around it goes on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go = threading.Event()
        self.go.set()

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        self.go.wait(60)
        return super().forward(segments)


def engine_of(kind: type[EmulatedEngine]) -> Any:
    plain = open_engine(DRAFT, kv_tokens=KV)
    assert isinstance(plain, EmulatedEngine)
    return kind(plain._emulated, plain._cost, plain.kv._pool)


async def test_a_draft_model_of_broken_numbers_is_left_for_another(place: Place) -> None:
    server = await place.verifier()
    broken, friend = await place.friend(engine_of(BrokenEngine)), await place.friend()
    await place.open(server, broken=broken, friend=friend)
    place.drafter("friend").users += 100
    sessions = [place.run(number) for number in range(4)]
    for session in sessions:
        await session.speculates()
        await session.end()
    assert place.drafter("broken").breaker._own[""]._failures or place.state("broken") is not BreakerState.CLOSED


async def test_a_drafter_that_hangs_in_its_model_is_left_and_taken_back_when_it_wakes(place: Place) -> None:
    server, engine = await place.verifier(), engine_of(StuckEngine)
    hanging = await place.friend(engine)
    await place.open(server, hanging=hanging)
    session = place.run()
    await session.speculates()
    engine.go.clear()
    began = time.monotonic()
    await until(lambda: names_of(server) == [set()])
    assert time.monotonic() - began > SILENCE_S * 0.9
    await session.advances()
    engine.go.set()
    await session.speculates()
    await session.end()


async def test_a_live_drafter_without_candidates_stays_attached(place: Place) -> None:
    server, quiet = await place.verifier(), await place.enemy(lambda *_: [])
    quiet.steps_on = True
    await place.open(server, quiet=quiet.address)
    session = place.run()
    await until(lambda: bool(quiet.kinds("open")))
    end = time.monotonic() + 4 * SILENCE_S
    while time.monotonic() < end:
        await session.advances(1)
        assert names_of(server) == [{"quiet"}]
        await asyncio.sleep(0.01)
    assert len(quiet.kinds("open")) == 1
    await session.end()


@pytest.mark.mended_faults
async def test_a_request_that_named_its_drafter_gets_no_other(place: Place) -> None:
    liar, server = Liar(), await place.verifier()
    enemy, friend = await place.enemy(liar), await place.friend()
    await place.open(server, enemy=enemy.address, friend=friend)
    session = place.run(drafters=["enemy"])
    await until(lambda: place.state("enemy") is BreakerState.OPEN)
    await session.advances(300)
    await until(lambda: names_of(server) == [set()])
    liar.lies = False
    await session.speculates(20)
    assert names_of(server) == [{"enemy"}] and place.state("enemy") is BreakerState.CLOSED
    await session.end()


@pytest.mark.mended_faults
async def test_a_session_that_moves_to_another_verifier_takes_its_present_drafters_along(place: Place) -> None:
    stays = await place.verifier()
    enemy, friend = await place.enemy(FAULTS["a token out of range"]), await place.friend()
    async with speculating() as first:
        await place.open(first, stays, enemy=enemy.address, friend=friend)
        place.drafter("friend").users += 1
        session = place.run()
        await session.speculates()
        await until(lambda: names_of(first) == [{"friend"}])
    await session.speculates()
    await until(lambda: names_of(stays) == [{"friend"}])
    assert len(enemy.kinds("open")) == 1
    await session.end()


async def test_a_drafter_that_appears_later_is_given_to_running_sessions(place: Place) -> None:
    server = await place.verifier()
    async with drafter(open_engine(DRAFT, kv_tokens=KV)) as address:
        pass
    config_ready = asyncio.create_task(place.open(server, late=address))
    async with drafter(open_engine(DRAFT, kv_tokens=KV), listen=address):
        await config_ready
    await until(lambda: not place.drafter("late").present)
    session = place.run()
    await session.advances()
    assert names_of(server) == [set()]
    async with drafter(open_engine(DRAFT, kv_tokens=KV), listen=address):
        await session.speculates()
        await session.end()
