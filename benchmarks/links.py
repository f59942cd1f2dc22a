"""The link layer alone: CPU for each session-round and latency of a round trip, at 1, 32 and 256 sessions.

usage: python -m benchmarks.links

A drafter's stream between two processes, with a peer that answers every commit with a chain of four candidates at once:
what is measured is batching, protobuf, gRPC and the event loops, at both ends.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from benchmarks.processes import cpu_s
from slipstream.errors import SlipstreamError
from slipstream.rpc import multiplexed_stream, proto_conversion
from slipstream.rpc.channel import channel
from slipstream.rpc.multiplexed_stream import SendQueue
from slipstream.rpc.server import Server
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2

SESSIONS = (1, 32, 256)
SECONDS = 4.0


class Echo(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers each commit at once."""

    async def Draft(
        self,
        requests: AsyncIterator[drafter_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse],
    ) -> None:
        outbox: SendQueue[types_pb2.Candidates] = SendQueue()

        def receive(request: drafter_pb2.DraftRequest) -> None:
            for command in request.commands:
                outbox.put(answer(command))

        await multiplexed_stream.serve(
            requests, context, outbox, receive, lambda c: drafter_pb2.DraftResponse(candidates=c)
        )


def answer(command: drafter_pb2.DraftCommand) -> types_pb2.Candidates:
    return types_pb2.Candidates(
        session=command.session,
        epoch=command.epoch,
        base_length=command.commit.base_length,
        generation=1,
        first_node=1,
        token_ids=[11, 12, 13, 14],
        confidences=proto_conversion.confidences_to_proto([-0.1, -0.2, -0.3, -0.4]),
    )


class Rounds:
    """The dialling end: a commit for every session, and again once every session was answered."""

    def __init__(self, sessions: int) -> None:
        self.sessions = sessions
        self.latencies: list[float] = []
        self.bytes = 0
        self.ready = asyncio.Event()
        self._answered = 0
        self._round = asyncio.Event()

    def connected(self) -> None:
        self.ready.set()

    def receive(self, frame: drafter_pb2.DraftResponse) -> None:
        self._answered += len(frame.candidates)
        self.bytes += frame.ByteSize()
        if self._answered == self.sessions:
            self._round.set()

    def lost(self, error: SlipstreamError) -> None:
        raise error

    async def run(
        self,
        link: multiplexed_stream.MultiplexedStream[
            drafter_pb2.DraftCommand, drafter_pb2.DraftRequest, drafter_pb2.DraftResponse
        ],
        seconds: float,
    ) -> None:
        until = time.perf_counter() + seconds
        while (started := time.perf_counter()) < until:
            self._answered = 0
            self._round.clear()
            for session in range(self.sessions):
                commit = drafter_pb2.DraftCommit(base_length=100, token_ids=[21, 22, 23])
                link.send(drafter_pb2.DraftCommand(session=session, epoch=1, commit=commit))
            await self._round.wait()
            self.latencies.append(time.perf_counter() - started)


async def measure(address: str, pid: int, sessions: int) -> None:
    async with channel(address) as line:
        rounds = Rounds(sessions)
        link: multiplexed_stream.MultiplexedStream[Any, Any, Any] = multiplexed_stream.MultiplexedStream(
            drafter_pb2_grpc.DrafterServiceStub(line).Draft, lambda c: drafter_pb2.DraftRequest(commands=c), rounds
        )
        running = asyncio.create_task(link.run())
        await rounds.ready.wait()
        await rounds.run(link, 0.5)
        rounds.latencies.clear()
        rounds.bytes = 0
        before, here = cpu_s(pid), time.process_time()
        await rounds.run(link, SECONDS)
        there, here = cpu_s(pid) - before, time.process_time() - here
        running.cancel()
    session_rounds = len(rounds.latencies) * sessions
    ordered = sorted(rounds.latencies)
    print(
        f"| {sessions} | {here / session_rounds * 1e6:.1f} | {there / session_rounds * 1e6:.1f} "
        f"| {statistics.median(ordered) * 1e3:.2f} | {ordered[int(0.99 * len(ordered))] * 1e3:.2f} "
        f"| {rounds.bytes / session_rounds:.0f} | {session_rounds / SECONDS:.0f} |"
    )


async def dial() -> None:
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.links", "--serve", stdout=asyncio.subprocess.PIPE
    )
    assert peer.stdout is not None
    address = (await peer.stdout.readline()).decode().strip()
    print("| sessions | µs CPU / session-round, dialling | serving | round trip p50 ms | p99 ms | bytes back | per s |")
    print("|---|---|---|---|---|---|---|")
    for sessions in SESSIONS:
        await measure(address, peer.pid, sessions)
    peer.terminate()
    await peer.wait()


async def serve() -> None:
    server = Server([lambda grpc_server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(Echo(), grpc_server)])
    print(await server.start("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1:] == ["--serve"] else dial())
