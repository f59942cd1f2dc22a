"""A gateway that was taken over, beside an honest one on the same verifier: the honest one's texts are the target's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import verifier_pb2, verifier_pb2_grpc
from tests.support.fleet import VerifierServer, emulated_text, gateway, opening, until, verifier

Command = verifier_pb2.DecodeCommand
HIGHEST = 2**32 - 1
TOKENS = 150
SESSIONS = 4


class Attacker:
    """A Decode stream that says anything, and hears how its sessions end."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.codes: set[int] = set()
        self.tokens = 0
        self.broken: grpc.StatusCode | None = None
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self.tokens += sum(len(done.token_ids) for done in response.rounds)
                self.codes |= {end.failure.code for end in response.ends if end.HasField("failure")}
        except grpc.RpcError as error:
            self.broken = error.code()

    async def say(self, *commands: Command) -> None:
        try:
            await self._call.write(verifier_pb2.DecodeRequest(commands=commands))
        except (asyncio.InvalidStateError, grpc.RpcError):
            await self._reader

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


def opened(number: int, session: str = "", epoch: int = 1, **options: Any) -> Command:
    open_ = opening(options.pop("prompt", [1, 2, 3]), session_id=session or f"mine-{number}", epoch=epoch, **options)
    return Command(session=number, epoch=epoch, open=open_)


Attack = Callable[[Attacker], Awaitable[None]]


async def duplicates(enemy: Attacker) -> None:
    await enemy.say(*[opened(1, f"other-{number}", tokens=4000) for number in range(200)])
    await enemy.say(*[opened(number, "mine", tokens=4000) for number in range(2, 200)])


async def takes_victims_sessions(enemy: Attacker) -> None:
    """Their names, if they were known, under an epoch that is not higher."""
    await enemy.say(*[opened(number, f"victim-{number}") for number in range(SESSIONS)])


async def wrong_epochs(enemy: Attacker) -> None:
    for epoch in (0, HIGHEST):
        await enemy.say(opened(epoch % 7 + 1, epoch=epoch, tokens=4000))
    mismatched = opened(9)
    mismatched.epoch = 5
    await enemy.say(mismatched, opened(10), opened(10, epoch=HIGHEST))
    for epoch in range(2, 300):
        await enemy.say(Command(session=10, epoch=epoch, attach=verifier_pb2.DecodeAttach()))


async def others_numbers(enemy: Attacker) -> None:
    """Commands for the numbers that the honest gateway uses, on a stream that never opened them."""
    for number in range(SESSIONS + 2):
        await enemy.say(
            Command(session=number, epoch=HIGHEST, close=verifier_pb2.DecodeClose()),
            Command(session=number, epoch=HIGHEST, attach=verifier_pb2.DecodeAttach()),
        )


async def closed_sessions(enemy: Attacker) -> None:
    for number in range(1, 100):
        close = Command(session=number, epoch=1, close=verifier_pb2.DecodeClose())
        credit = Command(session=number, epoch=1, credit=verifier_pb2.DecodeCredit(tokens=HIGHEST))
        await enemy.say(opened(number, tokens=4000), close, credit, close, credit)


async def huge_prefixes(enemy: Attacker) -> None:
    for number in range(8):
        await enemy.say(opened(number, prompt=[1] * 30_000, tokens=10))
    await enemy.say(opened(99, prompt=[1] * 2_000_000, tokens=10))


async def many_sessions(enemy: Attacker) -> None:
    await enemy.say(*[opened(number, tokens=4000) for number in range(2000)])


async def first_in_line(enemy: Attacker) -> None:
    """Sessions that claim to come before all others, with more tokens than there is KV for all of them."""
    for number in range(16):
        command = opened(number, prompt=[1] * 4000, tokens=2000)
        command.open.priority = -(2**31)
        await enemy.say(command)


async def floods(enemy: Attacker) -> None:
    await enemy.say(opened(1, credit=1, tokens=4000))
    for _ in range(10):
        await enemy.say(*[Command(session=1, epoch=1, credit=verifier_pb2.DecodeCredit())] * 5000)
        await enemy.say(*[Command(session=1, epoch=1, attach=verifier_pb2.DecodeAttach())] * 5000)
    await enemy.say(*[Command(session=5)] * 60_000, Command(session=1, epoch=1))


async def empty_frames(enemy: Attacker) -> None:
    for _ in range(3000):
        await enemy.say()


ATTACKS: dict[str, tuple[Attack, set[grpc.StatusCode]]] = {
    "opens sessions twice": (duplicates, {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED}),
    "claims sessions of others": (takes_victims_sessions, {grpc.StatusCode.ABORTED}),
    "makes up epochs": (wrong_epochs, {grpc.StatusCode.INVALID_ARGUMENT}),
    "commands sessions of others": (others_numbers, set()),
    "commands sessions that ended": (closed_sessions, set()),
    "sends huge prefixes": (huge_prefixes, set()),
    "opens thousands of sessions": (many_sessions, {grpc.StatusCode.RESOURCE_EXHAUSTED}),
    "comes before everybody": (first_in_line, set()),
    "floods with commands": (floods, {grpc.StatusCode.INVALID_ARGUMENT}),
    "floods with nothing": (empty_frames, set()),
}
"""What it does, and the codes that it is told at least."""


@asynccontextmanager
async def attacking(server: VerifierServer) -> AsyncIterator[Attacker]:
    unlimited = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(server.address, unlimited) as line:
        enemy = Attacker(verifier_pb2_grpc.VerifierServiceStub(line).Decode())
        try:
            yield enemy
        finally:
            await enemy.close()


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_hostile_gateway_changes_no_token_of_another_ones_sessions(name: str) -> None:
    attack, told = ATTACKS[name]
    engine = open_engine("emulated:", kv_tokens=1 << 16)
    prompts = [[number + 1] * 5 for number in range(SESSIONS)]
    sampling = SamplingParams(temperature=0.0)
    async with verifier(engine, max_sessions=256) as server, gateway(server.address) as honest:
        sessions = [
            (await honest.open(prompt, tokens=TOKENS, sampling=sampling, credit=40, session_id=f"victim-{number}"))
            for number, prompt in enumerate(prompts)
        ]
        await until(lambda: all(len(said.token_ids) >= 40 for _, said in sessions))  # all of them are in mid-text
        async with attacking(server) as enemy:
            await attack(enemy)
            for number, _ in sessions:
                await honest.command(number, credit=verifier_pb2.DecodeCredit(tokens=TOKENS))
            for (_, said), prompt in zip(sessions, prompts, strict=True):
                async with asyncio.timeout(60):
                    await said.done.wait()
                assert said.end is not None and said.end.reason == verifier_pb2.FINISH_REASON_LENGTH
                assert said.token_ids == emulated_text(prompt, TOKENS)
            wanted = {code.value[0] for code in told}
            await until(lambda: enemy.codes >= wanted)
            assert grpc.StatusCode.INTERNAL.value[0] not in enemy.codes
            assert enemy.broken in (None, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)
        await until(lambda: not server.service.by_id)
        assert (await honest.decode([9, 9], tokens=30)).token_ids == emulated_text([9, 9], 30)
        await until(lambda: engine.kv.blocks_free == engine.kv.blocks_total and not len(server.scheduler))


class Door:
    """A listener that counts who knocks."""

    def __init__(self) -> None:
        self.knocks = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._knocked, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.knocks += 1
        writer.close()


@pytest.mark.parametrize("by", ["open", "attach"])
@pytest.mark.parametrize("allowed", [False, True])
async def test_a_verifier_dials_only_allowed_addresses(by: str, allowed: bool) -> None:
    door = Door()
    patterns = ("drafter-*.drafters:50061", "127.0.0.1:*" if allowed else "127.0.0.1:1")
    async with (
        door as address,
        verifier(open_engine("emulated:"), drafters_allowed=patterns) as server,
        gateway(server.address) as client,
    ):
        number, said = await client.open([1], tokens=2000, credit=10, drafters=[address] if by == "open" else [])
        if by == "attach":
            named = verifier_pb2.DrafterAddress(address=address)
            await client.command(number, attach=verifier_pb2.DecodeAttach(drafters=[named]))
        if allowed:
            await until(lambda: door.knocks > 0)
            return
        async with asyncio.timeout(60):
            await said.done.wait()
        assert said.end is not None and said.end.failure.reason == "DRAFTER_ADDRESS"
        assert (await client.decode([2], tokens=20)).token_ids == emulated_text([2], 20)
    assert door.knocks == 0


async def test_a_session_that_names_too_many_drafters_has_none_of_them_dialled() -> None:
    async with verifier(open_engine("emulated:")) as server, channel(server.address) as line:
        call = verifier_pb2_grpc.VerifierServiceStub(line).Decode()
        named = [f"127.0.0.1:{port}" for port in range(1, 18)]
        await call.write(verifier_pb2.DecodeRequest(commands=[opened(1, drafters=named)]))
        end = (await call.read()).ends[0]
        assert end.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert not server.service.sources._links
        call.cancel()


def test_the_suite_covers_every_command() -> None:
    """A command that is added gets an attack too."""
    kinds = {field.name for field in Command.DESCRIPTOR.oneofs_by_name["command"].fields}
    assert kinds == {"open", "attach", "credit", "close"}
