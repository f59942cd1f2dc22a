"""What HTTP costs a gateway beside gRPC: CPU of the gateway's process for each chunk that it streams.

usage: python -m benchmarks.http [STREAMS] [TOKENS] [REPEATS]

An emulated target without a drafter, so that nearly every token is a chunk; one gateway serves both protocols, in
turns. Both clients count chunks and do nothing else with them. HTTP is read over plain sockets: a client library's work
would be the benchmark's own CPU, and on a small machine the server's delay.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.processes import ANYWHERE, MODELS, cpu_s, started
from benchmarks.records import Row, write
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

TARGET = "emulated:vocabulary=4096&base_ms=20"
PROMPT = [5, 6, 7, 8]
EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Run:
    chunks: int
    wall_s: float
    cpu_s: float
    ttft_s: float
    """Median of the streams' times to the first chunk."""

    @property
    def chunk_ms(self) -> float:
        """Milliseconds of the gateway's CPU for each chunk."""
        return 1e3 * self.cpu_s / self.chunks


Stream = Callable[[int], Awaitable[tuple[int, float]]]
"""Runs one stream with this number; returns its chunks, and seconds to the first one."""


async def measured(stream: Stream, streams: int, pid: int) -> Run:
    before, began = cpu_s(pid), time.perf_counter()
    done = await asyncio.gather(*(stream(number) for number in range(streams)))
    wall_s = time.perf_counter() - began
    return Run(sum(chunks for chunks, _ in done), wall_s, cpu_s(pid) - before, statistics.median(s for _, s in done))


def by_grpc(address: str, tokens: int) -> Stream:
    async def stream(number: int) -> tuple[int, float]:
        began, first, chunks = time.perf_counter(), 0.0, 0
        request = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=[*PROMPT, number]), max_tokens=tokens, ignore_eos=True
        )
        async with channel(address) as line:
            async for event in gateway_pb2_grpc.GatewayServiceStub(line).Generate(request):
                if event.HasField("delta"):
                    first = first or time.perf_counter() - began
                    chunks += 1
        return chunks, first

    return stream


def by_http(address: str, tokens: int) -> Stream:
    host, _, port = address.rpartition(":")

    async def stream(number: int) -> tuple[int, float]:
        asked = {"prompt": [*PROMPT, number], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        began, first, chunks = time.perf_counter(), 0.0, 0
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        while data := await reader.readline():
            if data.startswith(EVENT):
                first = first or time.perf_counter() - began
                chunks += 1
        writer.close()
        return chunks, first

    return stream


async def main(streams: int, tokens: int, repeats: int) -> None:
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        _, verifier = await started(
            stack, "verifier_svc", {"VERIFIER_MODEL": TARGET, "VERIFIER_LISTEN": ANYWHERE, "VERIFIER_MEASURE_S": "0"}
        )
        settings = {"VERIFIERS": verifier, "TOKENIZER": str(MODELS / "target"), "LISTEN": ANYWHERE, "HTTP": ANYWHERE}
        gateway, address = await started(
            stack, "gateway", {f"GATEWAY_{name}": value for name, value in settings.items()}
        )
        pid = gateway.process.pid
        kinds = {"gRPC": by_grpc(address, tokens), "HTTP": by_http(gateway.http, tokens)}
        for stream in kinds.values():
            await measured(stream, 2, pid)
        runs: dict[str, list[Run]] = {name: [] for name in kinds}
        for _ in range(repeats):
            for name, stream in kinds.items():
                runs[name].append(await measured(stream, streams, pid))
        for name, made in runs.items():
            rows.append(_row(name, streams, made))
    write("http", f"python -m benchmarks.http {streams} {tokens} {repeats}", rows)


def _row(name: str, streams: int, runs: list[Run]) -> Row:
    costs = [run.chunk_ms for run in runs]
    return {
        "protocol": name,
        "streams": streams,
        "chunks": statistics.median(run.chunks for run in runs),
        "chunks_per_s": round(statistics.median(run.chunks / run.wall_s for run in runs), 1),
        "ttft_ms": round(1e3 * statistics.median(run.ttft_s for run in runs), 1),
        "gateway_cpu_ms_per_chunk": round(statistics.median(costs), 3),
        "range": f"{min(costs):.3f}-{max(costs):.3f}",
    }


if __name__ == "__main__":
    given = [int(number) for number in sys.argv[1:]]
    asyncio.run(main(*(given + [32, 200, 3][len(given) :])))
