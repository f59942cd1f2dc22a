"""What stands in for `grpc.aio.Channel`: the calls that generated stubs make, over the simulated network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from tests.simulation.clock import PARTY, Party
from tests.simulation.network import Network, Parcel, Stream

Codec = Callable[[Any], Any]
CODES = {code.name: code for code in grpc.StatusCode}


def address_of(name: str) -> str:
    """As a verifier lets it be dialled: HOST:PORT."""
    return f"{name.replace(' ', '-')}:1"


class Channel:
    """To one address, whoever listens there when a call is made."""

    def __init__(self, network: Network, address: str) -> None:
        party = PARTY.get()
        assert party is not None, "only a party can dial"
        self._network = network
        self._party = party
        self._address = address.removeprefix("dns:///").removesuffix(":1").replace("-", " ")

    def unary_unary(self, method: str, request_serializer: Codec, response_deserializer: Codec, **_: Any) -> Any:
        async def ask(request: Any, timeout: float | None = None) -> Any:
            call = self._call(method, response_deserializer, _bytes(request), timeout)
            try:
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise _error("UNAVAILABLE", "the answer was lost.")
                await call.read()
                return answer
            finally:
                call.cancel()

        return ask

    def unary_stream(self, method: str, request_serializer: Codec, response_deserializer: Codec, **_: Any) -> Any:
        return lambda request, timeout=None: self._call(method, response_deserializer, _bytes(request), timeout)

    def stream_stream(self, method: str, request_serializer: Codec, response_deserializer: Codec, **_: Any) -> Any:
        return lambda: self._call(method, response_deserializer, b"", None)

    async def close(self) -> None:
        """Its streams end with the party."""

    def _call(self, method: str, decode: Codec, request: bytes, timeout: float | None) -> Call:
        call = Call(self._network, self._party, decode)
        call.start(self._address, Parcel("open", request, method), timeout)
        return call


class Call:
    """The dialling end of a stream."""

    def __init__(self, network: Network, party: Party, decode: Codec) -> None:
        self.party = party
        self._network = network
        self._decode = decode
        self._stream: Stream | None = None
        self._inbox: deque[bytes] = deque()
        self._connected = self._cancelled = False
        self._status: grpc.aio.AioRpcError | None = None
        self._over = False
        self._news = asyncio.Event()

    def start(self, address: str, opening: Parcel, timeout: float | None) -> None:
        self._stream = self._network.open(self, address)
        if self._stream is None:
            self._network.after(self._network.delay_s(), lambda: self.broken("connection refused."), self.party)
            return
        self._network.send(self._stream.there, opening)
        if timeout is not None:
            self._network.after(timeout, self._expire, self.party)

    async def wait_for_connection(self) -> None:
        await self._until(lambda: self._connected)

    async def write(self, request: Any) -> None:
        if self._over or self._stream is None:
            raise asyncio.InvalidStateError
        self._network.send(self._stream.there, Parcel("message", _bytes(request)))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        await self._until(lambda: bool(self._inbox))
        return self._decode(self._inbox.popleft()) if self._inbox else grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not grpc.aio.EOF:
            yield answer

    async def trailing_metadata(self) -> tuple[()]:
        return ()

    def cancel(self) -> bool:
        if self._over:
            return False
        self._cancelled = True
        self._hang_up()
        return True

    def receive(self, parcel: Parcel) -> None:
        if self._over:
            return
        if parcel.kind == "reset":
            self.broken("the peer broke the stream off.")
            return
        self._connected = True
        if parcel.kind == "message":
            self._inbox.append(parcel.data)
        elif parcel.kind == "trailers":
            if parcel.name != "OK":
                self._status = _error(parcel.name, parcel.details, parcel.metadata)
            self._end()
        self._news.set()

    def broken(self, why: str) -> None:
        if not self._over:
            self._status = _error("UNAVAILABLE", why)
            self._inbox.clear()
            self._hang_up()

    def _expire(self) -> None:
        if not self._over:
            self._status = _error("DEADLINE_EXCEEDED", "the time is over.")
            self._hang_up()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Or until the call is over, for whatever reason; raises the reason if it is a bad one."""
        while not condition() and not self._over:
            self._news.clear()
            await self._news.wait()
        if self._cancelled:
            raise asyncio.CancelledError
        if not condition() and self._status is not None:
            raise self._status

    def _hang_up(self) -> None:
        if self._stream is not None:
            self._network.send(self._stream.there, Parcel("reset"))
        self._end()

    def _end(self) -> None:
        self._over = True
        if self._stream is not None:
            self._network.close(self._stream)
        self._news.set()


def _error(code: str, details: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(CODES[code], grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


def _bytes(message: Any) -> bytes:
    """As the stub's own serialiser does it, but for the order of a map's entries, which differs from process to
    process."""
    data: bytes = message.SerializeToString(deterministic=True)
    return data
