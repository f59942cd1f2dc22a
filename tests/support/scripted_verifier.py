"""A verifier without a model: a real gRPC server whose sessions all return the same scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from slipstream.errors import SlipstreamError
from slipstream.rpc import multiplexed_stream, proto_conversion
from slipstream.rpc.multiplexed_stream import SendQueue
from slipstream.rpc.server import Server
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc, worker_pb2
from tests.support.loopback_addresses import ANY

Reply = verifier_pb2.Round | verifier_pb2.SessionEnd


@dataclass
class ScriptedSession:
    number: int
    epoch: int
    open: verifier_pb2.DecodeOpen
    tokens: list[int]
    credit: int
    outbox: SendQueue[Reply]

    @property
    def output(self) -> int:
        return len(self.tokens) - self.open.prefix.prompt_length


@dataclass(eq=False)
class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Output token i of every session is `script[i]`, `per_round` of them at a time."""

    model: types_pb2.ModelInfo
    script: list[int]
    per_round: int = 3
    limit: int | None = None
    """Output tokens after which every session stands still."""
    frozen: bool = False
    """Takes no steps, but stays connected."""
    mute: bool = False
    """Ends sessions without sending their end."""
    refuse: SlipstreamError | None = None
    """Answers every Open."""
    mangle: Callable[[verifier_pb2.Round], list[verifier_pb2.Round]] = field(default=lambda done: [done])
    """What is really sent for a round."""
    started_ms: int = 0
    """Milliseconds since 1970, as GetModel returns them."""
    steps: int = 0
    commands: list[verifier_pb2.DecodeCommand] = field(default_factory=list)
    sessions: dict[tuple[int, int], ScriptedSession] = field(default_factory=dict)
    """By stream and number."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def register(self, server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    def kinds(self) -> list[str]:
        return [str(command.WhichOneof("command")) for command in self.commands]

    def opens(self) -> list[verifier_pb2.DecodeOpen]:
        return [command.open for command in self.commands if command.HasField("open")]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def Decode(self, requests: AsyncIterator[verifier_pb2.DecodeRequest], context: Any) -> None:
        outbox: SendQueue[Reply] = SendQueue()
        async with asyncio.TaskGroup() as tasks:
            driver = tasks.create_task(self._drive(outbox))
            try:
                await multiplexed_stream.serve(
                    requests, context, outbox, lambda request: self._receive(request, outbox), pack
                )
            finally:
                for key in [key for key, session in self.sessions.items() if session.outbox is outbox]:
                    del self.sessions[key]
                driver.cancel()

    def _receive(self, request: verifier_pb2.DecodeRequest, outbox: SendQueue[Reply]) -> None:
        for command in request.commands:
            self.commands.append(command)
            session = self.sessions.get((id(outbox), command.session))
            if command.HasField("open"):
                self._open(command, outbox)
            elif session is None or command.epoch < session.epoch:
                continue
            elif command.HasField("credit"):
                session.credit += command.credit.tokens
            elif command.HasField("close"):
                self._end(session, outbox, verifier_pb2.FINISH_REASON_CANCELLED)

    def _open(self, command: verifier_pb2.DecodeCommand, outbox: SendQueue[Reply]) -> None:
        request = command.open
        if self.refuse is not None:
            failure = proto_conversion.failure_to_proto(self.refuse)
            reason = verifier_pb2.FINISH_REASON_ERROR
            outbox.put(
                verifier_pb2.SessionEnd(session=command.session, epoch=command.epoch, reason=reason, failure=failure)
            )
            return
        tokens = list(request.prefix.token_ids)
        session = ScriptedSession(command.session, command.epoch, request, tokens, request.credit, outbox)
        self.sessions[id(outbox), command.session] = session

    async def _drive(self, outbox: SendQueue[Reply]) -> None:
        while True:
            for session in [] if self.frozen else list(self.sessions.values()):
                if session.outbox is outbox:
                    self._step(session, outbox)
            self.steps += not self.frozen
            async with self.changed:
                self.changed.notify_all()
            await asyncio.sleep(0.001)

    def _step(self, session: ScriptedSession, outbox: SendQueue[Reply]) -> None:
        if session.credit <= 0 or (self.limit is not None and session.output >= self.limit):
            return
        base = len(session.tokens)
        stops = set(session.open.stop_token_ids)
        reason = verifier_pb2.FINISH_REASON_UNSPECIFIED
        for token in self.script[session.output : session.output + self.per_round]:
            session.tokens.append(token)
            if token in stops:
                reason = verifier_pb2.FINISH_REASON_STOP
            elif len(session.tokens) >= session.open.max_length:
                reason = verifier_pb2.FINISH_REASON_LENGTH
            if reason:
                break
        new = session.tokens[base:]
        session.credit -= len(new)
        done = verifier_pb2.Round(
            prompt_logprobs=_prompt_logprobs(session.open, base),
            session=session.number,
            epoch=session.epoch,
            base_length=base,
            token_ids=new,
            drafted=min(self.per_round, session.open.policy.max_draft_tokens),
            accepted=min(len(new) - 1, session.open.policy.max_draft_tokens),
            wait_us=1000,
            verify_us=2000,
        )
        for message in self.mangle(done):
            outbox.put(message)
        if reason:
            self._end(session, outbox, reason)

    def _end(self, session: ScriptedSession, outbox: SendQueue[Reply], reason: verifier_pb2.FinishReason) -> None:
        del self.sessions[id(outbox), session.number]
        if not self.mute:
            outbox.put(verifier_pb2.SessionEnd(session=session.number, epoch=session.epoch, reason=reason))


def pack(replies: list[Reply]) -> verifier_pb2.DecodeResponse:
    return verifier_pb2.DecodeResponse(
        rounds=[reply for reply in replies if isinstance(reply, verifier_pb2.Round)],
        ends=[reply for reply in replies if isinstance(reply, verifier_pb2.SessionEnd)],
    )


@asynccontextmanager
async def served(verifier: ScriptedVerifier, listen: str = ANY) -> AsyncIterator[tuple[str, Server]]:
    """The address of a running verifier, and its server to end it early."""
    load = worker_pb2.WatchResponse
    worker = WorkerService(
        WorkerIdentity(verifier.model, worker_pb2.ROLE_VERIFIER, started_ms=verifier.started_ms),
        lambda: load(sessions=len(verifier.sessions), steps=verifier.steps),
    )
    server = Server([verifier.register, worker.register])
    try:
        yield await server.start(listen), server
    finally:
        await server.stop(0)


@asynccontextmanager
async def served_drafter(model: types_pb2.ModelInfo, method: str = "model") -> AsyncIterator[str]:
    """The address of a worker that reports the role of a drafter."""
    worker = WorkerService(WorkerIdentity(model, worker_pb2.ROLE_DRAFTER, method), worker_pb2.WatchResponse)
    server = Server([worker.register])
    try:
        yield await server.start("127.0.0.1:0")
    finally:
        await server.stop(0)


def _prompt_logprobs(asked: verifier_pb2.DecodeOpen, base: int) -> list[types_pb2.TokenLogprobs]:
    """The i-th token of the prompt has log-probability -i, and 65 to 67 are the likeliest everywhere."""
    if not asked.HasField("prompt_logprobs") or base != len(asked.prefix.token_ids):
        return []
    top = asked.prompt_logprobs
    return [
        types_pb2.TokenLogprobs(logprob=-place, top_token_ids=[65, 66, 67][:top], top_logprobs=[0.0, -0.5, -1.0][:top])
        for place in range(1, asked.prefix.prompt_length)
    ]
