"""A client of gRPC whose requests come in all but their last byte, for as long as it likes: libraries of gRPC send
whole messages only."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from urllib.parse import urlsplit

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

QUIET_S = 1.0
"""So long without another byte sent: the server reads no more of what is held."""
READ_BYTES = 1 << 16


class HeldRequests:
    """Calls of one method on one connection. Sends as much of each request as flow control allows, but the last byte
    only after `release`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._line = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._line.initiate_connection()
        self._unsent: dict[int, memoryview] = {}
        self._held = 1
        self._open: set[int] = set()
        self._sent_at = 0.0
        self.sent = 0
        """Bytes of requests, their frames' heads left out."""
        self.statuses: dict[int, str] = {}
        """`grpc-status` of calls that ended, by stream; empty for those that were reset."""

    @classmethod
    async def connect(cls, address: str) -> HeldRequests:
        url = urlsplit(f"//{address}")
        return cls(*await asyncio.open_connection(url.hostname, url.port))

    def call(self, method: str, message: bytes, metadata: Iterable[tuple[str, str]] = ()) -> None:
        """Begins a call with a single request."""
        stream = self._line.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "gateway")]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self._line.send_headers(stream, headers)
        self._unsent[stream] = memoryview(struct.pack(">BI", 0, len(message)) + message)
        self._open.add(stream)

    async def until_quiet(self) -> None:
        """Sends until the server's windows let nothing through for QUIET_S."""
        self._sent_at = asyncio.get_running_loop().time()
        while (left := self._sent_at + QUIET_S - asyncio.get_running_loop().time()) > 0:
            await self._exchange(left)

    async def release(self) -> None:
        """Sends the last bytes too, until every call has ended."""
        self._held = 0
        while self._open:
            await self._exchange(None)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def _exchange(self, timeout_s: float | None) -> None:
        self._send()
        try:
            received = await asyncio.wait_for(self._reader.read(READ_BYTES), timeout_s)
        except TimeoutError:
            return
        assert received, "the server closed the connection"
        for event in self._line.receive_data(received):
            self._on_event(event)
        self._send()

    def _on_event(self, event: Event) -> None:
        match event:
            case DataReceived(stream_id=int(stream), flow_controlled_length=int(length)):
                self._line.acknowledge_received_data(length, stream)
            case (
                ResponseReceived(stream_id=int(stream), headers=list(headers))
                | TrailersReceived(stream_id=int(stream), headers=list(headers))
            ):
                self.statuses[stream] = str(dict(headers).get("grpc-status", ""))
            case StreamEnded(stream_id=int(stream)) | StreamReset(stream_id=int(stream)):
                self.statuses.setdefault(stream, "")
                self._open.discard(stream)
                self._unsent.pop(stream, None)

    def _send(self) -> None:
        for stream, unsent in list(self._unsent.items()):
            while True:
                room = min(self._line.local_flow_control_window(stream), self._line.max_outbound_frame_size)
                size = min(room, len(unsent) - self._held)
                if size <= 0:
                    break
                ends = size == len(unsent)
                self._line.send_data(stream, unsent[:size], end_stream=ends)
                self.sent += size
                self._sent_at = asyncio.get_running_loop().time()
                unsent = unsent[size:]
            self._unsent[stream] = unsent
            if not unsent:
                del self._unsent[stream]
        self._writer.write(self._line.data_to_send())
