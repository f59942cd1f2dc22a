"""The client for asyncio: completions and conversations that go on when a gateway dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict, Unpack
from weakref import WeakSet

import grpc

from slipstream.client.client import RetrySettings, explained_absence, pieces, rest
from slipstream.client.completion import Completion, Piece
from slipstream.client.gateway_endpoint import GatewayEndpoint, plaintext_key_by_default
from slipstream.client.options import (
    ChatOptions,
    GenerateOptions,
    Message,
    Prompt,
    RollbackOptions,
    build_chat,
    build_request,
    build_rollback,
    check_names,
)
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.rpc.channel import error_of, parsed
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

LOCAL = "127.0.0.1:50051"
"""Address of a gateway that `slipstream serve` started."""
NAME, NAMED_S = "dns:", 3.0
"""Prefix of an address that names several gateways, and `RetrySettings.begin_s` for it: one look-up of the name each
second, and one more pod of a rollout."""
ANSWER_S = 10.0
"""Seconds within which a gateway answers what is not a stream."""
Call = Callable[[gateway_pb2_grpc.GatewayServiceStub], Awaitable[Any]]


class ClientOptions(TypedDict, total=False):
    """Options of a client's connections."""

    api_key: str
    """Default: the environment's SLIPSTREAM_API_KEY."""
    tls: bool
    """Connect with TLS to a gateway whose certificate the system trusts."""
    ca: str
    """PEM file of the CA that signed the gateway's certificate; implies `tls`. Default: SLIPSTREAM_CA."""
    plaintext_key: bool
    """Send the key without TLS to other machines too, on a network that is yours. Default: SLIPSTREAM_PLAINTEXT_KEY."""
    traceparent: str
    """W3C trace context that requests belong to."""
    tracestate: str
    """W3C trace state beside it."""
    retry: RetrySettings


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Where a session stands after a rollback, or a branch of it: what `resume` takes."""

    session_id: str
    tokens: int
    """Output tokens that stayed; the edit and what is new follow them."""
    revision: int


class AsyncStream:
    """An output that is being written, as an iterator of its pieces.

    A read that is cancelled, for example by a timeout, loses nothing: the next read returns what it would have.
    """

    def __init__(self, completion: Completion, found: AsyncGenerator[Piece]) -> None:
        self.completion = completion
        """Output received so far: perhaps a piece more than was read."""
        self._found = found
        self._reading: asyncio.Task[Piece | None] | None = None
        self._order = asyncio.Lock()

    async def read(self) -> Piece | None:
        """The next piece; None at the end. Raises the SlipstreamError with which the output broke off, at every further
        read too."""
        async with self._order:
            if self._reading is None:
                self._reading = asyncio.create_task(self._next())
            try:
                # The task outlives a reader that is cancelled: gRPC would end the whole call with it.
                piece = await asyncio.shield(self._reading)
            except asyncio.CancelledError:
                reader = asyncio.current_task()
                if self._reading.cancelled() and reader is not None and not reader.cancelling():
                    return None  # another task closed the stream
                raise
            self._reading = None
            return piece

    async def finish(self) -> Completion:
        """Read to the end."""
        while await self.read() is not None:
            pass
        return self.completion

    async def close(self) -> None:
        """Leave the output. The session waits for `resume` until its record expires; `cancel` ends it."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._found.aclose()

    async def _next(self) -> Piece | None:
        return await anext(self._found, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        piece = await self.read()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """A client of the gateways at one or several addresses, which have one session store.

    A request begins on the first gateway that answers. When one dies, its streams go on with the next token on another.
    """

    def __init__(self, servers: str | Sequence[str] = LOCAL, **options: Unpack[ClientOptions]) -> None:
        """Connects with the first request. Raises InvalidArgument for no server or an option that does not exist."""
        addresses = [servers] if isinstance(servers, str) else list(servers)
        check_names(options, ClientOptions)
        if not addresses:
            raise InvalidArgument("there is no server; name one or several, each as HOST:PORT.")
        environ, tls = os.environ.get, options.get("tls", False)
        key = options.get("api_key", environ("SLIPSTREAM_API_KEY", ""))
        ca, parent = options.get("ca", environ("SLIPSTREAM_CA", "")), options.get("traceparent", "")
        plain = options.get("plaintext_key", plaintext_key_by_default())
        where = tls, ca, parent, options.get("tracestate", "")
        self._endpoints = [GatewayEndpoint(address, key, *where, plaintext_key=plain) for address in addresses]
        self._retry = options.get("retry") or RetrySettings(begin_anywhere=True)
        if any(address.startswith(NAME) for address in addresses):
            self._retry = replace(self._retry, begin_s=max(NAMED_S, self._retry.begin_s))
        self._channels: list[grpc.aio.Channel] = []
        self._streams: WeakSet[AsyncStream] = WeakSet()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continue a text. Raises what reading a stream raises."""
        async with self.stream(prompt, **options) as stream:
            return await stream.finish()

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """Answer a conversation, in the model's chat template. Raises what reading a stream raises."""
        async with self.stream_chat(messages, **options) as stream:
            return await stream.finish()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Continue a text piece by piece."""
        return self._begin(build_request(prompt, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """Answer a conversation piece by piece."""
        return self._begin(build_chat(messages, **options))

    def resume(
        self, session: str | RolledBack, tokens: int = 0, *, mixed_arithmetic: bool | None = None
    ) -> AsyncStream:
        """The rest of a session's output behind its first `tokens`, on whichever gateway. The rest of one that was
        rolled back begins behind the tokens that stayed. `mixed_arithmetic` takes the place of the session's own."""
        started = gateway_pb2.Started(session_id=session if isinstance(session, str) else session.session_id)
        if isinstance(session, RolledBack):
            tokens, started.revision = session.tokens, session.revision
        completion = Completion(
            started=started, begins=tokens, token_ids=[0] * tokens, mixed_arithmetic=mixed_arithmetic
        )
        return self._following(completion, rest(self._connected(), completion, self._retry))

    async def rollback(self, session_id: str, keep: int = 0, **options: Unpack[RollbackOptions]) -> RolledBack:
        """Take a session back to its first `keep` output tokens, wherever it runs; `resume` goes on from there."""
        return await self._roll_back(build_rollback(session_id, keep, False, **options))

    async def branch(self, session_id: str, keep: int = 0, **options: Unpack[RollbackOptions]) -> RolledBack:
        """Make a new session of the first `keep` output tokens of another one, which stays as it is."""
        return await self._roll_back(build_rollback(session_id, keep, True, **options))

    async def cancel(self, session_id: str) -> None:
        """End a session, wherever it runs."""
        request = gateway_pb2.CancelRequest(session_id=session_id)
        await self._ask(lambda stub: stub.Cancel(request, timeout=ANSWER_S))

    async def session(self, session_id: str) -> gateway_pb2.GetSessionResponse:
        """A session's record, running or ended."""
        request = gateway_pb2.GetSessionRequest(session_id=session_id)
        record: gateway_pb2.GetSessionResponse = await self._ask(
            lambda stub: stub.GetSession(request, timeout=ANSWER_S)
        )
        return record

    async def models(self) -> list[gateway_pb2.ServedModel]:
        """The models that can be asked for, with their drafters."""
        return list((await self.list_models()).models)

    async def list_models(self) -> gateway_pb2.ListModelsResponse:
        """The models, and the state of the gateway's session store."""
        request = gateway_pb2.ListModelsRequest()
        listed: gateway_pb2.ListModelsResponse = await self._ask(
            lambda stub: stub.ListModels(request, timeout=ANSWER_S)
        )
        return listed

    async def fleet(self) -> gateway_pb2.GetFleetResponse:
        """Every worker that the gateway knows, with its load. For operators' keys."""
        request = gateway_pb2.GetFleetRequest()
        workers: gateway_pb2.GetFleetResponse = await self._ask(lambda stub: stub.GetFleet(request, timeout=ANSWER_S))
        return workers

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of a text, as `generate` would read it."""
        request = gateway_pb2.TokenizeRequest(text=text, model=model)
        return list((await self._ask(lambda stub: stub.Tokenize(request, timeout=ANSWER_S))).token_ids)

    async def close(self) -> None:
        """Leave all streams and close the connections."""
        for stream in list(self._streams):
            await stream.close()
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    def _begin(self, request: gateway_pb2.GenerateRequest) -> AsyncStream:
        completion = Completion()
        return self._following(completion, pieces(self._connected(), request, completion, self._retry))

    def _following(self, completion: Completion, found: AsyncGenerator[Piece]) -> AsyncStream:
        stream = AsyncStream(completion, found)
        self._streams.add(stream)
        return stream

    def _connected(self) -> list[grpc.aio.Channel]:
        if not self._channels:
            self._channels = [endpoint.channel() for endpoint in self._endpoints]
        return self._channels

    async def _roll_back(self, request: gateway_pb2.RollbackRequest) -> RolledBack:
        answer = await self._ask(lambda stub: stub.Rollback(request, timeout=ANSWER_S))
        return RolledBack(answer.key.id, answer.output_tokens, answer.revision)

    async def _ask(self, call: Call) -> Any:
        """The answer of the first gateway that gives one. Raises the last error."""
        channels = self._connected()
        for channel in channels:
            try:
                return parsed(await call(gateway_pb2_grpc.GatewayServiceStub(channel)))
            except grpc.aio.AioRpcError as error:
                failed = error_of(error)
            if not isinstance(failed, Unavailable) or channel is channels[-1]:
                raise explained_absence(failed) from None
        raise AssertionError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
