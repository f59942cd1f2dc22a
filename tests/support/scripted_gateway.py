"""A gateway for tests: over real gRPC, with scripted verifiers at the network boundary."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, GatewayServer, running
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_store import SessionStore
from slipstream.rpc.channel import channel, error_of
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2, verifier_pb2
from tests.support.scripted_verifier import ScriptedVerifier, served, served_drafter
from tests.support.toy_tokenizer import toy_model

TEXT = "One day — der Käse 日本 lief 🚀 davon, and nobody stopped it; " * 4


def with_logprobs(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
    """A verifier's round with log-probabilities, which scripted ones have none of."""
    for token in done.token_ids:
        top = {"top_token_ids": [token, 66], "top_logprobs": [-0.5, -3.0]}
        done.logprobs.append(types_pb2.TokenLogprobs(logprob=-0.5, **top))
    return [done]


@dataclass
class Answer:
    started: gateway_pb2.Started = field(default_factory=gateway_pb2.Started)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[gateway_pb2.Logprob] = field(default_factory=list)
    text: str = ""
    finished: gateway_pb2.Finished = field(default_factory=gateway_pb2.Finished)

    def add(self, event: gateway_pb2.GenerateResponse | gateway_pb2.ResumeResponse) -> None:
        if event.HasField("started"):
            self.started = event.started
        elif event.HasField("delta"):
            assert event.delta.offset == len(self.tokens)
            self.tokens += event.delta.token_ids
            self.logprobs += event.delta.logprobs
            self.text += event.delta.text
        else:
            self.finished = event.finished


@dataclass
class Front:
    """A running gateway, its client stub, and what it stands on."""

    gateway: GatewayServer
    stub: Any
    verifiers: list[ScriptedVerifier]
    servers: list[Any]
    addresses: list[str]
    store: SessionStore
    tokenizer: Tokenizer

    def call(self, **request: Any) -> Any:
        asked = {"prompt": "Tell me.", "max_tokens": 40} | request
        if "prompt_token_ids" in asked:
            del asked["prompt"]
        return self.stub.Generate(gateway_pb2.GenerateRequest(**asked))

    async def generate(self, **request: Any) -> Answer:
        answer = Answer()
        try:
            async for event in self.call(**request):
                answer.add(event)
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    async def resume(self, session: str, answer: Answer | None = None, **more: Any) -> Answer:
        """Events that a client receives that has `answer` already."""
        answer = answer or Answer()
        request = gateway_pb2.ResumeRequest(session_id=session, offset=len(answer.tokens), **more)
        try:
            async for event in self.stub.Resume(request):
                answer.add(event)
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    async def roll_back(self, session: str, keep: int, **change: Any) -> Any:
        request = gateway_pb2.RollbackRequest(session_id=session, output_tokens=keep, **change)
        try:
            return await self.stub.Rollback(request)
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def record(self, session: str) -> Any:
        return await self.stub.GetSession(gateway_pb2.GetSessionRequest(session_id=session))


class Setting:
    """Builds fronts for one test and ends them after it."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._gateways = 0
        self.tokenizer = load_tokenizer(str(folder))
        self.model = toy_model(folder)
        self.eos = self.model.eos_token_ids[0]

    def verifier(self, script: str | list[int] = TEXT, **options: Any) -> ScriptedVerifier:
        tokens = self.tokenizer.encode(script).ids if isinstance(script, str) else script
        return ScriptedVerifier(self.model, tokens, **options)

    async def front(
        self,
        *verifiers: ScriptedVerifier,
        store: SessionStore | None = None,
        tracing: Tracing | None = None,
        **config: Any,
    ) -> Front:
        opened = [await self._stack.enter_async_context(served(verifier)) for verifier in verifiers]
        store = store or MemoryStore(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
        servers, addresses = [server for _, server in opened], [address for address, _ in opened]
        gateway = await self.gateway(addresses, store, tracing, **config)
        line = await self._stack.enter_async_context(channel(gateway.address))
        stub = gateway_pb2_grpc.GatewayServiceStub(line)
        return Front(gateway, stub, list(verifiers), servers, addresses, store, self.tokenizer)

    async def beside(self, front: Front, store: SessionStore, **config: Any) -> Front:
        """Another gateway in front of the same verifiers."""
        gateway = await self.gateway(front.addresses, store, **config)
        line = await self._stack.enter_async_context(channel(gateway.address))
        return replace(front, gateway=gateway, stub=gateway_pb2_grpc.GatewayServiceStub(line), store=store)

    async def gateway(
        self, verifiers: list[str], store: SessionStore, tracing: Tracing | None = None, **config: Any
    ) -> GatewayServer:
        settings = GatewayConfig(
            verifiers=tuple(verifiers),
            tokenizer=str(self.folder),
            listen="127.0.0.1:0",
            **{"grace_s": 0.0, **config},
        )
        self._gateways += 1  # names of sessions must differ
        world = GatewayDependencies(random.Random(6 + self._gateways).getrandbits, store=store, tracing=tracing)
        gateway = await self._stack.enter_async_context(running(settings, world))
        await gateway.ready()
        return gateway

    async def drafter(self, method: str = "model", **changes: Any) -> str:
        model = types_pb2.ModelInfo()
        model.CopyFrom(self.model)
        model.MergeFrom(types_pb2.ModelInfo(**changes))
        return await self._stack.enter_async_context(served_drafter(model, method))
