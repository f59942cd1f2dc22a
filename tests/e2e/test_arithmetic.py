"""Real verifiers of one model name that write different texts: killed, restarted and replaced amid texts. A text is one
verifier's from its first token to its last, or a typed error, or it is marked."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.prompts import held_out
from slipstream.errors import ARITHMETIC_GONE, Unavailable
from slipstream.rpc.channel import channel, error_of
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.conftest import ROOT, UNMEASURED, serve_environment
from tests.support.checkpoints import other_weights
from tests.support.loopback_addresses import HOST, free_port
from tests.support.scripted_gateway import Answer

TARGET = ROOT / "models" / "target"
SHORT, SEEN = 24, 8
LONG = 600
"""Tokens of a text that is not over before its verifier is killed: what a client has not read yet waits in gRPC's
buffers, and holds up nothing."""
PROMPTS = 8
"""Tried one after another, until two types continue one otherwise: they differ in few texts of this length."""
CLIENTS = 3
REST_S = 0.2
"""Between a client's requests: verifiers that load need the cores."""

pytestmark = pytest.mark.timeout(480)


@dataclass
class Verifier:
    """At an address that stays its own, whatever runs there."""

    stack: AsyncExitStack
    address: str = field(default_factory=lambda: f"{HOST}:{free_port()}")
    role: Role | None = None

    async def run(self, folder: Path, dtype: str = "float32") -> None:
        """Ends what runs, which finishes its sessions, and starts another one."""
        if self.role is not None:
            await self.role.end()
        settings = {"MODEL": str(folder), "DTYPE": dtype, "LISTEN": self.address, "GRACE_S": "60", "THREADS": "1"}
        environment = serve_environment() | UNMEASURED | {f"VERIFIER_{name}": each for name, each in settings.items()}
        self.role = Role("verifier_svc", environment)
        self.stack.push_async_callback(self.role.end)
        await self.role.start()

    async def kill(self) -> None:
        assert self.role is not None
        self.role.process.kill()
        await self.role.process.wait()


@dataclass
class Gateway:
    stub: Any

    async def read(self, answer: Answer, call: Any, tokens: int = 1 << 30) -> Answer:
        """Adds events until there are so many tokens. Raises the typed error of the call."""
        try:
            async for event in call:
                answer.add(event)
                if len(answer.tokens) >= tokens:
                    break
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    def ask(self, tokens: int, prompt: str, **more: Any) -> Any:
        sampling = gateway_pb2.SamplingOptions(temperature=0.8, seed=5)
        request = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "sampling": sampling} | more
        return self.stub.Generate(gateway_pb2.GenerateRequest(**request))

    async def text(self, tokens: int, prompt: str) -> list[int]:
        return (await self.read(Answer(), self.ask(tokens, prompt))).tokens

    async def resume(self, answer: Answer) -> Answer:
        asked = gateway_pb2.ResumeRequest(session_id=answer.started.session_id, offset=len(answer.tokens))
        return await self.read(answer, self.stub.Resume(asked))

    async def served(self, verifiers: int) -> list[gateway_pb2.ServedArithmetic]:
        """What the gateway lists once it knows so many verifiers."""
        async with asyncio.timeout(60):
            while True:
                (model,) = (await self.stub.ListModels(gateway_pb2.ListModelsRequest())).models
                if sum(each.verifiers for each in model.arithmetics) == verifiers:
                    return list(model.arithmetics)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def gateway(*verifiers: Verifier, **settings: str) -> AsyncIterator[Gateway]:
    given = {"LISTEN": f"{HOST}:0", "TOKENIZER": str(TARGET), "VERIFIERS": ",".join(each.address for each in verifiers)}
    environment = os.environ | {f"GATEWAY_{name}": each for name, each in (given | settings).items()}
    role = Role("gateway", environment)
    try:
        async with channel(await role.start()) as line:
            yield Gateway(gateway_pb2_grpc.GatewayServiceStub(line))
    finally:
        await role.end()


@asynccontextmanager
async def verifiers(count: int) -> AsyncIterator[list[Verifier]]:
    async with AsyncExitStack() as stack:
        yield [Verifier(stack) for _ in range(count)]


@pytest.mark.parametrize(
    "other", [pytest.param("weights", marks=pytest.mark.slow), pytest.param("type", marks=pytest.mark.long)]
)
async def test_a_killed_verifiers_texts_are_its_own_a_typed_error_or_marked(tmp_path: Path, other: str) -> None:
    runs = [(TARGET, "float32"), (TARGET, "bfloat16")]
    if other == "weights":
        runs[1] = other_weights(TARGET, tmp_path / "target"), "float32"
    async with verifiers(2) as both:
        await asyncio.gather(*(each.run(*run) for each, run in zip(both, runs, strict=True)))
        async with gateway(both[0]) as first, gateway(both[1]) as second:
            where = {(await alone.served(1))[0].arithmetic: number for number, alone in enumerate((first, second))}
            for prompt in held_out(PROMPTS, seed=3):
                own = await asyncio.gather(first.text(LONG, prompt), second.text(LONG, prompt))
                if own[0] != own[1]:
                    break
        assert own[0] != own[1], "both types write the same"
        async with gateway(*both, REHOMING_WAIT_S="6", CREDIT_TOKENS="16") as front:
            assert len(where) == len(await front.served(2)) == 2
            refusing, mixing = Answer(), Answer()
            calls = [front.ask(LONG, prompt), front.ask(LONG, prompt, mixed_arithmetic=True)]
            for answer, call in zip((refusing, mixing), calls, strict=True):
                await front.read(answer, call, SEEN)
            home = where[await arithmetic_of(front, refusing)]
            await both[home].kill()
            with pytest.raises(Unavailable) as caught:
                await front.read(refusing, calls[0])
            assert caught.value.reason == ARITHMETIC_GONE
            assert refusing.tokens == own[home][: len(refusing.tokens)] and len(refusing.tokens) < LONG
            await front.read(mixing, calls[1])
            check_marked(mixing, own)
            await both[home].run(*runs[home])
            await front.served(2)
            await front.resume(refusing)
        assert refusing.tokens == own[home]
        assert len(refusing.finished.statistics.arithmetics) == 1


async def arithmetic_of(front: Gateway, answer: Answer) -> str:
    session = await front.stub.GetSession(gateway_pb2.GetSessionRequest(session_id=answer.started.session_id))
    return str(session.arithmetics[-1].arithmetic)


def check_marked(answer: Answer, own: list[list[int]]) -> None:
    """A text that moved has a mark where it did; one that did not is one verifier's."""
    spans = [(each.arithmetic, each.offset) for each in answer.finished.statistics.arithmetics]
    if len(spans) == 1:
        assert answer.tokens in own
        return
    (first, start), (second, moved) = spans
    assert first != second and start == 0 < moved < len(answer.tokens) == len(own[0])
    assert any(answer.tokens[:moved] == text[:moved] for text in own)


@dataclass
class Load:
    """Clients that send one request after the other."""

    front: Any
    prompts: list[str]
    texts: list[tuple[str, list[int], str]] = field(default_factory=list)
    """Prompt, tokens and arithmetic of each text that ended."""
    begun_later: list[str] = field(default_factory=list)
    """Arithmetics of the texts that began after `update`."""
    update: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, first: int) -> None:
        for at in itertools.count(first):
            if self.ended.is_set():
                return
            prompt, updated = self.prompts[at % len(self.prompts)], self.update.is_set()
            answer = await self.front.read(Answer(), self.front.ask(SHORT, prompt))
            (span,) = answer.finished.statistics.arithmetics
            self.texts.append((prompt, answer.tokens, span.arithmetic))
            if updated:
                self.begun_later.append(span.arithmetic)
            await asyncio.sleep(REST_S)

    async def later(self) -> None:
        """As many more texts have ended as there are clients."""
        seen = len(self.texts) + CLIENTS
        async with asyncio.timeout(120):
            while len(self.texts) <= seen:
                await asyncio.sleep(0.02)


async def test_restarts_keep_texts_and_an_update_of_the_weights_mixes_none(tmp_path: Path) -> None:
    """Two replicas of one Deployment, replaced one by one under load: by themselves, then by other weights."""
    prompts = held_out(3, seed=3)
    new = other_weights(TARGET, tmp_path / "target")
    async with verifiers(2) as both:
        await asyncio.gather(*(each.run(TARGET) for each in both))
        async with gateway(*both, REHOMING_WAIT_S="120") as front:
            (before,) = await front.served(2)
            old_texts = {prompt: await front.text(SHORT, prompt) for prompt in prompts}
            load = Load(front, prompts)
            async with asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(load.run(number))
                await both[0].run(TARGET)
                await load.later()
                assert all(tokens == old_texts[prompt] for prompt, tokens, _ in load.texts)
                restarted = len(load.texts)
                await both[1].run(new)
                while len(served := await front.served(2)) < 2:
                    await asyncio.sleep(0.05)
                assert [each.newest for each in served] == [True, False] and served[1].arithmetic == before.arithmetic
                while not any(name == served[0].arithmetic for _, _, name in load.texts):
                    await load.later()  # the gateway's stream to it comes up a little later
                load.update.set()
                while len(load.begun_later) < 2 * CLIENTS:
                    await load.later()
                await both[0].run(new)
                await load.later()
                load.ended.set()
            names = {served[0].arithmetic, before.arithmetic}
            async with gateway(both[1]) as alone:
                new_texts = {prompt: await alone.text(SHORT, prompt) for prompt in prompts}
    assert all(old_texts[prompt] != new_texts[prompt] for prompt in prompts)
    wanted = {before.arithmetic: old_texts, served[0].arithmetic: new_texts}
    assert {name for _, _, name in load.texts} == names
    assert all(tokens == wanted[name][prompt] for prompt, tokens, name in load.texts)
    order = "".join("n" if name == served[0].arithmetic else "o" for name in load.begun_later)
    assert "o" not in order, f"new sessions go to new weights: {order}"
    print(f"{len(load.texts)} texts, {restarted} of them before the update, 0 mixtures")
