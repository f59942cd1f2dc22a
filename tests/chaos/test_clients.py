"""Clients that are slow, too many, out of time, or gone, on a running system of real processes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from slipstream.rpc.channel import CHANNEL_OPTIONS, channel, error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.chaos.cluster import CREDIT, MAX_SESSIONS, Cluster, asking, expected
from tests.support.resumed_completion import resume

pytestmark = [pytest.mark.slow, pytest.mark.mended_faults, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 200
LONG = 8000
"""More tokens than a client's connection, the gateway and its credit hold."""
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""Of a connection: what a client does not read is soon the gateway's to keep."""


@dataclass
class Reader:
    """A client that reads when the test says so."""

    first: int
    stub: gateway_pb2_grpc.GatewayServiceStub
    tokens: int
    timeout_s: float | None = None
    said: Completion = field(default_factory=Completion)
    call: Any = field(init=False)

    def __post_init__(self) -> None:
        self.call = self.stub.Generate(asking(self.first, self.tokens), timeout=self.timeout_s)

    async def read(self, tokens: int, pause_s: float = 0.0) -> None:
        """Until so many tokens have come; `pause_s` before each event."""
        try:
            while len(self.said.token_ids) < tokens:
                await asyncio.sleep(pause_s)
                self.said.take(await self.call.read())
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def logged(self) -> int:
        """Tokens that are in the session's log."""
        request = gateway_pb2.GetSessionRequest(session_id=self.said.started.session_id)
        return len((await self.stub.GetSession(request)).output_token_ids)


@asynccontextmanager
async def reading(
    system: Cluster, count: int, tokens: int, timeout_s: float | None = None, options: tuple[tuple[str, int], ...] = ()
) -> AsyncIterator[list[Reader]]:
    """So many clients of the first gateway, each with the first tokens of its text."""
    async with AsyncExitStack() as stack:
        line = grpc.aio.insecure_channel(system.gateways[0].door, options=(*CHANNEL_OPTIONS, *options))
        stub = gateway_pb2_grpc.GatewayServiceStub(await stack.enter_async_context(line))
        readers = [Reader(index + 1, stub, tokens, timeout_s) for index in range(count)]
        for reader in readers:
            stack.callback(reader.call.cancel)
        await asyncio.gather(*(reader.read(1) for reader in readers))
        yield readers


async def ms_per_token(system: Cluster) -> float:
    """Of the median text among those that others ask for now; every one is right."""
    texts = await system.say(6, TOKENS)
    completions = await asyncio.gather(*(text.running for text in texts))
    assert [done.token_ids for done in completions] == [text.expected() for text in texts]
    return 1e3 * statistics.median(done.tpot_s or 0.0 for done in completions)


async def resumed(system: Cluster, reader: Reader) -> None:
    """On the other gateway, to the end: it is the text that it would have been."""
    async with channel(system.gateways[1].door) as line:
        await resume([line], reader.said)
    assert reader.said.token_ids == expected(reader.first, reader.tokens)


async def test_clients_that_read_slowly_or_not_at_all_delay_no_other_client_and_cost_little_memory(
    system: Cluster,
) -> None:
    alone = await ms_per_token(system)
    before = system.resident_mib()
    async with reading(system, 8, LONG, options=SMALL_WINDOW) as readers:
        slow, stalled = readers[:4], readers[4:]
        slowly = [asyncio.create_task(reader.read(LONG, pause_s=0.1)) for reader in slow]
        lengths, longer = [0], [1]
        while lengths != longer:
            await asyncio.sleep(1.0)
            lengths, longer = longer, [await reader.logged() for reader in stalled]
        beside = await ms_per_token(system)
        grown = {name: mib - before[name] for name, mib in system.resident_mib().items()}
        assert CREDIT < max(longer) < LONG, "the credit is not what stops them"
        assert longer == [await reader.logged() for reader in stalled]
        assert all(not task.done() for task in slowly)
        for reader in stalled:  # and on they go
            await reader.read(longer[0] + CREDIT)
        for task in slowly:
            task.cancel()
        await asyncio.gather(*slowly, return_exceptions=True)
        for reader in readers:
            assert reader.said.token_ids == expected(reader.first, len(reader.said.token_ids))
    await system.at_rest()
    print(f"four slow and four stalled clients: others {alone:.1f} ms/token without them, {beside:.1f} beside them")
    print(f"stalled at {longer} tokens; MiB more: " + ", ".join(f"{name} {mib:.1f}" for name, mib in grown.items()))
    assert max(grown.values()) < 32.0
    assert beside < 2.0 * alone


async def test_a_full_gateway_refuses_with_a_retry_delay_and_admits_again_once_sessions_end(system: Cluster) -> None:
    async with channel(system.gateways[0].door) as full, channel(system.gateways[1].door) as other:
        async with reading(system, MAX_SESSIONS, LONG):
            for _ in range(10):
                with pytest.raises(ResourceExhausted) as refused:
                    await complete(full, asking(100, TOKENS))
                assert refused.value.reason == "SESSIONS"
                assert refused.value.retry_s
            assert (await complete(other, asking(100, TOKENS))).token_ids == expected(100, TOKENS)
        await system.at_rest()
        assert (await complete(full, asking(100, TOKENS))).token_ids == expected(100, TOKENS)


async def test_a_session_whose_clients_deadline_has_passed_is_released_and_may_be_resumed(system: Cluster) -> None:
    async with reading(system, 4, 4 * TOKENS, timeout_s=1.0) as readers:
        for reader in readers:
            with pytest.raises(DeadlineExceeded):
                await reader.read(4 * TOKENS)
        await system.at_rest()
        assert all(0 < len(reader.said.token_ids) < 4 * TOKENS for reader in readers)
        await asyncio.gather(*(resumed(system, reader) for reader in readers))
    await system.at_rest()


async def test_a_session_whose_client_is_gone_is_released_and_may_be_resumed(system: Cluster) -> None:
    way = system.network.way("client", "gateway a")
    async with reading(system, 4, 4 * TOKENS) as readers:
        await asyncio.gather(*(reader.read(TOKENS) for reader in readers))
        before = way.resets
        way.reset()
        for reader in readers:
            with pytest.raises(Unavailable):
                await reader.read(4 * TOKENS)
        assert way.resets > before
        await system.at_rest()
        await asyncio.gather(*(resumed(system, reader) for reader in readers))
    await system.at_rest()
