"""The client for code without asyncio: the asynchronous one, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from slipstream.client.async_client import LOCAL, AsyncClient, AsyncStream, ClientOptions, RolledBack
from slipstream.client.completion import Completion, Piece
from slipstream.client.options import ChatOptions, GenerateOptions, Message, Prompt, RollbackOptions
from slipstream.errors import FailedPrecondition
from slipstream.v1 import gateway_pb2

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, which other threads give coroutines to."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slipstream-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. An interrupt of the caller, such as Ctrl-C, cancels it. Raises FailedPrecondition
        once the loop is closed."""
        if self.closed:
            work.close()
            raise FailedPrecondition("the client is closed; open another one.", reason="CLOSED")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Stream:
    """An output that is being written, as an iterator of its pieces. An interrupted read loses nothing."""

    def __init__(self, thread: LoopThread, stream: AsyncStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def completion(self) -> Completion:
        """Output received so far: perhaps a piece more than was read."""
        return self._stream.completion

    def finish(self) -> Completion:
        """Read to the end."""
        return self._thread.run(self._stream.finish())

    def close(self) -> None:
        """Leave the output. The session waits for `resume` until its record expires; `cancel` ends it."""
        self._thread.run(self._stream.close())

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = self._thread.run(self._stream.read())
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """A client of the gateways at one or several addresses. Its methods are those of `AsyncClient`, and wait."""

    def __init__(self, servers: str | Sequence[str] = LOCAL, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(servers, **options)
        self._thread = LoopThread()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        return self._thread.run(self._client.generate(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        return self._thread.run(self._client.chat(messages, **options))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        return self._stream(lambda: self._client.stream(prompt, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Stream:
        return self._stream(lambda: self._client.stream_chat(messages, **options))

    def resume(self, session: str | RolledBack, tokens: int = 0, *, mixed_arithmetic: bool | None = None) -> Stream:
        return self._stream(lambda: self._client.resume(session, tokens, mixed_arithmetic=mixed_arithmetic))

    def rollback(self, session_id: str, keep: int = 0, **options: Unpack[RollbackOptions]) -> RolledBack:
        return self._thread.run(self._client.rollback(session_id, keep, **options))

    def branch(self, session_id: str, keep: int = 0, **options: Unpack[RollbackOptions]) -> RolledBack:
        return self._thread.run(self._client.branch(session_id, keep, **options))

    def cancel(self, session_id: str) -> None:
        self._thread.run(self._client.cancel(session_id))

    def session(self, session_id: str) -> gateway_pb2.GetSessionResponse:
        return self._thread.run(self._client.session(session_id))

    def models(self) -> list[gateway_pb2.ServedModel]:
        return self._thread.run(self._client.models())

    def list_models(self) -> gateway_pb2.ListModelsResponse:
        return self._thread.run(self._client.list_models())

    def fleet(self) -> gateway_pb2.GetFleetResponse:
        return self._thread.run(self._client.fleet())

    def tokenize(self, text: str, model: str = "") -> list[int]:
        return self._thread.run(self._client.tokenize(text, model))

    def close(self) -> None:
        """Leave all streams, close the connections and end the thread."""
        if not self._thread.closed:
            try:
                self._thread.run(self._client.close())
            finally:
                self._thread.close()

    def _stream(self, begin: Callable[[], AsyncStream]) -> Stream:
        async def begun() -> AsyncStream:
            return begin()  # on the loop, to which gRPC binds its channels

        return Stream(self._thread, self._thread.run(begun()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
