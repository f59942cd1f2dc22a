"""Far more sessions than there is KV for, on a virtual clock: nobody is lost, no text changes, all blocks come back."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from benchmarks.virtual import VOCABULARY, System, World, system
from capacity.clock import run
from slipstream.engine.emulated.model import LinearCost
from slipstream.engine.engine import ModelOutput
from slipstream.engine.segment import Segment
from slipstream.v1 import types_pb2, verifier_pb2
from tests.support.fleet import emulated_text
from verifier_svc.service import GatewayStream

PASS = LinearCost(0.005, 0.00001)


def commanded(number: int, epoch: int, **command: object) -> verifier_pb2.DecodeRequest:
    told = verifier_pb2.DecodeCommand(session=number, epoch=epoch, **command)  # type: ignore[arg-type]
    return verifier_pb2.DecodeRequest(commands=[told])


@dataclass
class Client:
    """One session as its gateway sees it."""

    number: int
    prompt: list[int]
    length: int
    epoch: int = 1
    output: list[int] = field(default_factory=list)
    end: verifier_pb2.SessionEnd | None = None
    cancelled: bool = False

    def opened(self, running: System, drafts: int, credit: int, priority: int, salt: str) -> verifier_pb2.DecodeRequest:
        return commanded(
            self.number,
            self.epoch,
            open=verifier_pb2.DecodeOpen(
                key=types_pb2.SessionKey(id=f"session-{self.number}", epoch=self.epoch),
                prefix=types_pb2.Prefix(token_ids=self.prompt, prompt_length=len(self.prompt)),
                sampling=types_pb2.SamplingOptions(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
                max_length=self.length,
                policy=verifier_pb2.DecodePolicy(max_draft_tokens=drafts),
                drafters=[running.drafter] if drafts else [],
                credit=credit,
                priority=priority,
                cache_salt=salt,
            ),
        )


class Gateway:
    """A stream, and the sessions on it."""

    def __init__(self, running: System) -> None:
        self.peer: GatewayStream = running.gateway()
        self.clients: dict[int, Client] = {}
        self.reading = asyncio.create_task(self._read())
        self.left = False

    async def _read(self) -> None:
        while True:
            for reply in await self.peer.outbox.take():
                client = self.clients[reply.session]
                if isinstance(reply, verifier_pb2.Round) and reply.epoch == client.epoch:
                    assert reply.base_length == len(client.prompt) + len(client.output)
                    client.output += reply.token_ids
                elif isinstance(reply, verifier_pb2.SessionEnd):
                    client.end = reply

    def open(self, client: Client, request: verifier_pb2.DecodeRequest) -> None:
        self.clients[client.number] = client
        self.peer.receive(request)

    def leave(self) -> None:
        """The stream breaks."""
        self.left = True
        self.peer.close()
        self.reading.cancel()


TEXTS = {first: emulated_text([first], 5000, VOCABULARY) for first in range(16)}
"""By first token; what follows a prompt of n tokens begins at n - 1."""


def right(client: Client) -> bool:
    start = len(client.prompt) - 1
    return client.output == TEXTS[client.prompt[0]][start : start + len(client.output)]


@pytest.mark.parametrize("blocks", [pytest.param(24, marks=pytest.mark.slow), 60])
def test_many_times_the_room_is_asked_for_and_all_texts_are_right(blocks: int) -> None:
    """Sixty sessions of up to six blocks each."""

    async def main() -> None:
        async with system(World(target=PASS, blocks=blocks)) as running:
            gateway, dice = Gateway(running), random.Random(blocks)
            for number in range(60):
                prompt = [number % 7] + [dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 90))]
                client = Client(number, prompt, len(prompt) + dice.randrange(1, 300))
                gateway.open(client, client.opened(running, 4 * (number % 2), 0, 0, ""))
            while not all(client.end for client in gateway.clients.values()):
                await asyncio.sleep(0.1)
            for client in gateway.clients.values():
                assert client.end is not None and client.end.reason == verifier_pb2.FINISH_REASON_LENGTH
                assert len(client.output) == client.length - len(client.prompt) and right(client)
            memory = running.scheduler.kv_admission
            assert memory.preemptions > 0 and memory.waiting == 0
            assert running.engine.kv.blocks_free == blocks
            gateway.leave()

    run(main())


def test_a_session_that_no_memory_could_hold_is_refused_and_no_other_one_is_affected() -> None:
    async def main() -> None:
        async with system(World(target=PASS, blocks=4)) as running:
            gateway = Gateway(running)
            for number, length in enumerate((4 * 32, 4 * 32 + 1)):
                client = Client(number, [5], length)
                gateway.open(client, client.opened(running, 0, 0, 0, ""))
            while not all(client.end for client in gateway.clients.values()):
                await asyncio.sleep(0.1)
            fits, refused = (client.end for client in gateway.clients.values())
            assert fits is not None and fits.reason == verifier_pb2.FINISH_REASON_LENGTH
            assert refused is not None and refused.failure.reason == "KV_TOO_SMALL"
            gateway.leave()

    run(main())


def test_long_prompts_and_short_ones_wait_for_each_other_within_bounds() -> None:
    """A prompt of twelve passes is read while short ones come all the time: neither waits for the other's end."""

    async def main() -> None:
        async with system(World(target=LinearCost(0.0, 0.001))) as running:
            gateway = Gateway(running)
            long = Client(0, [1] * 3000, 3001)
            gateway.open(long, long.opened(running, 0, 0, 0, ""))
            loop = asyncio.get_running_loop()
            started, waits = loop.time(), list[float]()
            number = 0
            while long.end is None:
                number += 1
                short = Client(number, [number % VOCABULARY, *range(99)], 101)
                gateway.open(short, short.opened(running, 0, 0, 0, str(number)))
                came = loop.time()
                while short.end is None:
                    await asyncio.sleep(0.001)
                waits.append(loop.time() - came)
            alone = 3.0
            assert max(waits) < 3 * 0.512 and loop.time() - started < 3 * alone
            gateway.leave()

    run(main())


class Storm:
    """Clients that come all the time, read slowly, roll back, cancel, or break their stream off; steps that fail."""

    def __init__(self, running: System, seed: int) -> None:
        self.running = running
        self.dice = random.Random(seed)
        self.gateways = [Gateway(running) for _ in range(3)]
        self.faults = 0
        self._forward = running.engine.forward
        running.engine.forward = self._faulty  # type: ignore[method-assign]

    def _faulty(self, segments: list[Segment]) -> ModelOutput:
        if self.dice.random() < 0.02:
            self.faults += 1
            raise RuntimeError("a fault")
        return self._forward(segments)

    async def blow(self, sessions: int) -> None:
        for number in range(sessions):
            if self.dice.random() < 0.002:
                self.gateways[0].leave()
                self.gateways[0] = Gateway(self.running)
            gateway = self.dice.choice(self.gateways)
            self._open(gateway, number)
            self._disturb(gateway)
            await asyncio.sleep(self.dice.expovariate(600.0))

    async def end(self) -> None:
        """Slow clients read on at last."""
        for gateway in self.gateways:
            for client in gateway.clients.values():
                more = verifier_pb2.DecodeCredit(tokens=1000)
                gateway.peer.receive(commanded(client.number, client.epoch, credit=more))
        while len(self.running.scheduler):
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        for gateway in self.gateways:
            gateway.leave()

    def _open(self, gateway: Gateway, number: int) -> None:
        dice, family = self.dice, number % 5  # sessions of a family begin alike
        prompt = [family, *range(100, 100 + dice.choice([5, 40, 70])), number % VOCABULARY]
        client = Client(number, prompt, len(prompt) + dice.randrange(1, 40))
        credit, priority, salt = dice.choice([0, 0, 8]), dice.choice([0, 0, 1]), dice.choice(["", "", "other"])
        gateway.open(client, client.opened(self.running, dice.choice([0, 4]), credit, priority, salt))

    def _disturb(self, gateway: Gateway) -> None:
        """One of the gateway's late sessions."""
        client = self.dice.choice(list(gateway.clients.values())[-40:])
        if client.end is not None:
            return
        kind = self.dice.random()
        if kind < 0.2:
            client.cancelled = True
            gateway.peer.receive(commanded(client.number, client.epoch, close=verifier_pb2.DecodeClose()))
        elif kind < 0.7:
            gateway.peer.receive(commanded(client.number, client.epoch, credit=verifier_pb2.DecodeCredit(tokens=20)))


@pytest.mark.mended_faults
@pytest.mark.parametrize("sessions", [300, *(pytest.param(each, marks=pytest.mark.slow) for each in (1000, 10_000))])
def test_sessions_with_cancels_and_faults_leave_every_block_free(sessions: int) -> None:
    blocks = 100

    async def main() -> list[Client]:
        async with system(World(target=PASS, blocks=blocks)) as running:
            storm = Storm(running, 1)
            await storm.blow(sessions)
            await storm.end()
            memory = running.scheduler.kv_admission
            assert memory.waiting == 0 and running.engine.kv.blocks_free == blocks
            assert storm.faults > 0 and memory.preemptions > 0
            assert memory.prefix_tokens_found > memory.prefix_tokens_sought // 10
            return [client for gateway in storm.gateways for client in gateway.clients.values()]

    clients = run(main())
    assert all(right(client) for client in clients)
    assert any(client.cancelled for client in clients)
    for client in clients:
        assert client.end is not None and not client.end.HasField("failure")
        whole = client.end.reason == verifier_pb2.FINISH_REASON_LENGTH
        assert whole == (len(client.output) == client.length - len(client.prompt))
        assert whole or (client.cancelled and client.end.reason == verifier_pb2.FINISH_REASON_CANCELLED)
