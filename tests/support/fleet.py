"""Verifiers and drafters as real gRPC servers in the test's own loop, on engines of the test's choice."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running as drafter_running
from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.engine import Engine, HiddenRequest, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.proposers.base import OpenedProposer
from slipstream.proposers.draft_model import ModelProposer
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import CHANNEL_OPTIONS
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.loopback_addresses import ANY
from verifier_svc.config import VerifierConfig
from verifier_svc.verifier import VerifierParts, VerifierServer
from verifier_svc.verifier import running as verifier_running


@asynccontextmanager
async def drafter(
    engine: Engine,
    *,
    max_sessions: int = 256,
    max_nodes: int = 32,
    listen: str = ANY,
    grammars: Grammars | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[str]:
    """The address of a running drafter; with `grammars` it guesses inside of them."""
    limits = {"max_sessions": max_sessions, "max_nodes": max_nodes, "expand": 4}  # not measured: alike on every machine
    config = DrafterConfig(model="given", listen=listen, grace_s=0.0, **limits)
    proposer = ModelProposer(
        engine,
        width=config.width,
        proposal_tokens=config.proposal_tokens,
        grammars=grammars,
    )
    opened = OpenedProposer(engine.model, proposer)
    async with drafter_running(config, lambda _: opened, tracing=tracing) as running:
        yield running.address


@asynccontextmanager
async def verifier(engine: Engine, tracing: Tracing | None = None, **settings: Any) -> AsyncIterator[VerifierServer]:
    """A running verifier with `settings` of its configuration; its cost curve starts from nothing."""
    defaults: dict[str, Any] = {
        "model": "given",
        "listen": "127.0.0.1:0",
        "prefill_tokens": 64,
        "min_path_probability": 0.0,
        "measure_s": 0.0,
        "grace_s": 0.0,
    }
    config = VerifierConfig(**(defaults | settings))
    async with verifier_running(config, VerifierParts(opening=lambda _: engine, tracing=tracing)) as running:
        yield running


def slowed(engine: Engine, seconds: float = 0.03) -> Engine:
    """A target that costs several guesses, on whatever machine: so slow as to be worth guessing for."""
    forward = engine.forward

    def slow(segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        time.sleep(seconds)
        return forward(segments, hidden)

    engine.forward = slow  # type: ignore[method-assign]
    return engine


def emulated_text(prompt: list[int], tokens: int, vocabulary: int = 256) -> list[int]:
    """The emulated target's text after a prompt, without any server."""
    engine = open_engine(f"emulated:vocabulary={vocabulary}")
    assert isinstance(engine, EmulatedEngine)
    return engine.text(prompt, tokens)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once the condition holds; fail where it does not come true."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def in_time(attempt: Callable[[], Awaitable[bool]], tries: int = 5) -> bool:
    """Whether one of some tries succeeds: on a busy machine all candidates of a text may come too late."""
    for _ in range(tries):
        if await attempt():
            return True
    return False


@dataclass
class Decoded:
    """Events of a session's stream."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[verifier_pb2.Round] = field(default_factory=list)
    events: list[verifier_pb2.DrafterEvent] = field(default_factory=list)
    end: verifier_pb2.SessionEnd | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def drafted(self) -> int:
        return sum(round.drafted for round in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(round.accepted for round in self.rounds)


def opening(
    prompt: list[int],
    *,
    tokens: int = 32,
    sampling: SamplingParams | None = None,
    drafters: list[str] | None = None,
    max_draft_tokens: int = 8,
    stop: list[int] | None = None,
    credit: int = 0,
    session_id: str = "session",
    epoch: int = 1,
    trusted: bool = False,
    output: list[int] | None = None,
    structure: StructuredOutput | None = None,
    top_logprobs: int | None = None,
    min_length: int = 0,
    cache_salt: str = "",
    tenant: str = "",
    details: bool = False,
    prompt_logprobs: int | None = None,
    reasoning_limit: types_pb2.ReasoningLimit | None = None,
) -> verifier_pb2.DecodeOpen:
    """An Open of a session, whose prefix is the prompt and what is known of the output."""
    addresses = [
        verifier_pb2.DrafterAddress(address=address, name="model", trusted=trusted) for address in drafters or []
    ]
    return verifier_pb2.DecodeOpen(
        key=types_pb2.SessionKey(id=session_id, epoch=epoch),
        prefix=types_pb2.Prefix(token_ids=[*prompt, *(output or [])], prompt_length=len(prompt)),
        sampling=proto_conversion.sampling_to_proto(sampling or SamplingParams(temperature=0.0)),
        max_length=len(prompt) + tokens,
        stop_token_ids=stop or [],
        policy=verifier_pb2.DecodePolicy(max_draft_tokens=max_draft_tokens),
        drafters=addresses,
        credit=credit,
        round_details=details,
        structured_output=proto_conversion.structure_to_proto(structure),
        top_logprobs=top_logprobs,
        min_length=min_length,
        cache_salt=cache_salt,
        tenant=tenant,
        prompt_logprobs=prompt_logprobs,
        reasoning_limit=reasoning_limit,
    )


class Gateway:
    """One Decode stream, spoken by hand."""

    def __init__(self, address: str) -> None:
        # The port may have been another test's: gRPC's common pool of connections remembers that nobody was there.
        self._channel = grpc.aio.insecure_channel(
            address, options=(*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        )
        self._call = verifier_pb2_grpc.VerifierServiceStub(self._channel).Decode()
        self._numbers = itertools.count(1)
        self._writing = asyncio.Lock()
        self.sessions: dict[int, Decoded] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._call:
            for round in response.rounds:
                session = self.sessions[round.session]
                session.rounds.append(round)
                session.token_ids.extend(round.token_ids)
            for event in response.drafter_events:
                self.sessions[event.session].events.append(event)
            for end in response.ends:
                self.sessions[end.session].end = end
                self.sessions[end.session].done.set()

    async def send(self, *commands: verifier_pb2.DecodeCommand) -> None:
        async with self._writing:  # gRPC breaks a call that is written to twice at a time
            await self._call.write(verifier_pb2.DecodeRequest(commands=commands))

    async def open(self, prompt: list[int], **options: Any) -> tuple[int, Decoded]:
        """Open a session with the options of `opening`, under a name of its own if it is given none."""
        command = self._opened(prompt, **options)
        await self.send(command)
        return command.session, self.sessions[command.session]

    async def open_at_once(self, prompts: list[list[int]], **options: Any) -> list[Decoded]:
        """Sessions that one frame opens."""
        commands = [self._opened(prompt, **options) for prompt in prompts]
        await self.send(*commands)
        return [self.sessions[command.session] for command in commands]

    def _opened(self, prompt: list[int], *, epoch: int = 1, **options: Any) -> verifier_pb2.DecodeCommand:
        number = next(self._numbers)
        self.sessions[number] = Decoded()
        options.setdefault("session_id", f"session-{number}")
        return verifier_pb2.DecodeCommand(session=number, epoch=epoch, open=opening(prompt, epoch=epoch, **options))

    async def command(self, number: int, epoch: int = 1, **command: Any) -> None:
        await self.send(verifier_pb2.DecodeCommand(session=number, epoch=epoch, **command))

    async def decode(self, prompt: list[int], **options: Any) -> Decoded:
        """Open a session and wait for its end."""
        _, decoded = await self.open(prompt, **options)
        async with asyncio.timeout(60):
            await decoded.done.wait()
        return decoded

    async def broken(self) -> None:
        """Wait until the stream ends; raises the call's error."""
        await asyncio.shield(self._reader)

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()  # a call that broke on this side leaves its reader waiting
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()


@asynccontextmanager
async def gateway(address: str) -> AsyncIterator[Gateway]:
    speaker = Gateway(address)
    try:
        yield speaker
    finally:
        await speaker.close()
