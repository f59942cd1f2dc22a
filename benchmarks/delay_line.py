"""A line of a set length between two processes: a TCP relay that delivers every byte so much later, and counts them.

usage: python -m benchmarks.delay_line      (settings: LINE_TO=HOST:PORT, LINE_DELAY_MS=ONE_WAY, LINE_LISTEN=HOST:PORT)

Bandwidth is not limited and bytes keep their order, as on a long clean line. SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from slipstream.config import from_env
from slipstream.process import run_role, until_signal

CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class LineConfig:
    to: str
    delay_ms: float = 0.0
    listen: str = "127.0.0.1:0"


class Line:
    """Relays connections to `to`, each direction `delay_s` late."""

    def __init__(self, to: str, delay_s: float) -> None:
        self._host, _, self._port = to.rpartition(":")
        self._delay_s = delay_s
        self.bytes_there = 0
        self.bytes_back = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.close()
            return
        # Whichever side ends first ends both; what is still on the line is lost, as it would be.
        ways = [
            asyncio.create_task(self._relay(reader, far_writer, there=True)),
            asyncio.create_task(self._relay(far_reader, writer, there=False)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        writer.close()
        far_writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, there: bool) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(CHUNK):
                if there:
                    self.bytes_there += len(chunk)
                else:
                    self.bytes_back += len(chunk)
                if self._delay_s:
                    loop.call_later(self._delay_s, writer.write, chunk)
                else:
                    writer.write(chunk)


async def main() -> None:
    config = from_env(LineConfig, "LINE_")
    line = Line(config.to, config.delay_ms / 1e3)
    host, _, port = config.listen.rpartition(":")
    server = await asyncio.start_server(line.connect, host, int(port))
    async with server:
        print(f"ready grpc={host}:{server.sockets[0].getsockname()[1]}", flush=True)
        await until_signal()


if __name__ == "__main__":
    run_role("delay line", main())
