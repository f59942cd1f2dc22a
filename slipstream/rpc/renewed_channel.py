"""Channels that outlive their certificates. gRPC cannot change those of a client, so another channel takes over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import grpc

from slipstream.rpc.tls import Certificates, Material

Make = Callable[[Material], grpc.aio.Channel]


class RenewedChannel(grpc.aio.Channel):
    """Looks at every call whether the certificates are still the same; if not, it is made on a new channel.

    Calls that run keep the channel that they began on, and it ends with the last of them. A link opens a new stream
    after every loss, so nothing else has to be told of a change.
    """

    def __init__(self, certificates: Certificates, make: Make) -> None:
        self._certificates = certificates
        self._make = make
        self._material = certificates.current()
        self._channel = make(self._material)
        self._living = weakref.WeakSet([self._channel])

    def unary_unary(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("unary_unary", method, serialisers)

    def unary_stream(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("unary_stream", method, serialisers)

    def stream_unary(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("stream_unary", method, serialisers)

    def stream_stream(self, *method: Any, **serialisers: Any) -> Any:
        return self._calling("stream_stream", method, serialisers)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._present().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._present().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._present().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for channel in list(self._living):
            await channel.close(grace)

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _present(self) -> grpc.aio.Channel:
        material = self._certificates.current()
        if material is not self._material:
            self._material, self._channel = material, self._make(material)
            self._living.add(self._channel)
        return self._channel

    def _calling(self, kind: str, method: Any, serialisers: Any) -> Any:
        def call(*request: Any, **options: Any) -> Any:
            channel = self._present()
            made = getattr(channel, kind)(*method, **serialisers)(*request, **options)
            made.add_done_callback(lambda _, kept=channel: None)  # without its last reference a channel closes
            return made

        return call
