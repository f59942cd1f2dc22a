"""What stands in for `grpc.aio.Server` and its contexts: a party's services, reached over the simulated network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import grpc

from slipstream.rpc.server import Register
from slipstream.rpc.status_interceptor import StatusInterceptor
from tests.simulation.clock import Party
from tests.simulation.network import Network, Parcel, Stream


class Host:
    """A party that listens at an address. Errors become statuses by the real interceptor."""

    def __init__(self, network: Network, party: Party, address: str, services: list[Register]) -> None:
        self.party = party
        self.network = network
        self.methods: dict[str, Any] = {}
        self.calls: dict[int, Serving] = {}
        """Running calls, by the number of their stream."""
        for register in services:
            register(self)  # type: ignore[arg-type]
        self._address = address
        self._stopping = False
        network.hosts[address] = self

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Generated code registers its methods by name too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def accept(self, stream: Stream, parcel: Parcel) -> None:
        if stream.listener is None and parcel.kind == "open":
            if self._stopping:
                self.network.break_off(stream)
            else:
                stream.listener = Serving(self, stream, parcel)
        elif stream.listener is not None:
            stream.listener.receive(parcel)

    # As `slipstream.rpc.server.Server`.

    async def set_serving(self, ready: bool) -> None:
        """Health is not simulated."""

    async def stop(self, grace_s: float) -> None:
        """No new calls; those that run have `grace_s`."""
        self._stopping = True
        if self.network.hosts.get(self._address) is self:
            del self.network.hosts[self._address]
        if self.calls:
            await asyncio.wait([call.task for call in self.calls.values()], timeout=grace_s)
        for call in list(self.calls.values()):
            self.network.break_off(call.stream)
        if self.calls:
            await asyncio.wait([call.task for call in self.calls.values()])


class Serving:
    """The listening end of a stream, and its `ServicerContext`."""

    def __init__(self, host: Host, stream: Stream, opening: Parcel) -> None:
        self.party = host.party
        self.stream = stream
        self._host = host
        self._handler = host.methods[opening.name]
        self._opening = opening
        self._inbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._over = False
        self.task = self.party.spawn(self._run())
        host.calls[stream.number] = self
        self.task.add_done_callback(lambda _: host.calls.pop(stream.number))

    def receive(self, parcel: Parcel) -> None:
        if parcel.kind == "message":
            self._inbox.append(parcel.data)
            self._news.set()
        elif parcel.kind == "reset":
            self.broken("the peer broke the stream off.")

    def broken(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._host.network.close(self.stream)
            self._host.network.send(self.stream.back, Parcel("reset"))
            self.task.cancel()

    # As handlers see it.

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._send(Parcel("headers"))

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        """Clients here set no deadline."""

    async def read(self) -> bytes:
        return self._opening.data

    async def write(self, message: Any) -> None:
        if self._over:
            raise grpc.aio.InternalError("the peer is gone")
        self._send(Parcel("message", message.SerializeToString(deterministic=True)))
        await asyncio.sleep(0)

    async def abort_with_status(self, status: Any) -> None:
        metadata = tuple((key, value) for key, value in status.trailing_metadata)
        self._end(Parcel("trailers", b"", status.code.name, status.details, metadata))
        raise grpc.aio.AbortError

    async def _run(self) -> None:
        details: Any = SimpleNamespace(method=self._opening.name)
        handler: Any = await StatusInterceptor().intercept_service(self._continuation, details)
        try:
            if self._handler.request_streaming:
                await handler.stream_stream(self._requests(), self)
            elif self._handler.response_streaming:  # the interceptor takes a single request by `read`
                async for answer in handler.stream_stream(None, self):
                    await self.write(answer)
            else:
                await self.write(await handler.stream_unary(None, self))
        except grpc.aio.AbortError:
            return
        except grpc.aio.InternalError:
            return
        self._end(Parcel("trailers", name="OK"))

    async def _continuation(self, _: Any) -> Any:
        return self._handler

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            while self._inbox:
                yield self._handler.request_deserializer(self._inbox.popleft())
            self._news.clear()
            await self._news.wait()

    def _send(self, parcel: Parcel) -> None:
        self._host.network.send(self.stream.back, parcel)

    def _end(self, trailers: Parcel) -> None:
        if not self._over:
            self._over = True
            self._send(trailers)
