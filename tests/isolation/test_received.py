"""What calls of gRPC hold before, and while, their requests come in: on a gateway as a process of its own, the most
memory that it had meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import pytest

from slipstream.client.gateway_endpoint import digest
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.conftest import starting
from tests.isolation.scribe import SCRIBE, TARGET, scribe
from tests.isolation.system import peak_mib
from tests.support.scripted_verifier import served

KEY = "a" * 40
CALLS = 150
"""At a time, each with almost as much as gRPC lets through: 600 MB in all."""
MOST_MIB = 200
"""That they may add: 1 where no key comes with them, and 160 with one. With 300 calls it was 560 and 1,090."""
ROUNDS = 2


@pytest.mark.parametrize(
    ("metadata", "code"),
    [((), "UNAUTHENTICATED"), ((("authorization", f"Bearer {KEY}"),), "INVALID_ARGUMENT")],
    ids=["without a key", "with a key"],
)
async def test_large_calls_at_a_time_hold_a_bounded_part_of_the_memory(
    tmp_path: Path, metadata: tuple[tuple[str, str], ...], code: str
) -> None:
    (tmp_path / "keys.toml").write_text(f'alice = {{ sha256 = "{digest(KEY).hex()}" }}\n')
    request = gateway_pb2.GenerateRequest(prompt="x" * (MAX_MESSAGE_BYTES - 100_000), model=SCRIBE)
    async with served(scribe()) as (verifier, _), starting() as (_, start):
        role, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_TOKENIZER=str(TARGET),
            GATEWAY_API_KEYS=str(tmp_path / "keys.toml"),
            GATEWAY_FAILED_KEYS_PER_MINUTE="0",
        )
        codes: Counter[str] = Counter()

        async def call(stub: gateway_pb2_grpc.GatewayServiceStub) -> None:
            try:
                async for _ in stub.Generate(request, metadata=metadata, timeout=120):
                    pass
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] += 1

        async with grpc.aio.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as line:
            stub = gateway_pb2_grpc.GatewayServiceStub(line)
            await call(stub)
            peak_mib(role)
            before = peak_mib(role)
            for _ in range(ROUNDS):
                await asyncio.gather(*(call(stub) for _ in range(CALLS)))
            grown = peak_mib(role) - before
    assert codes.keys() == {code}, codes
    assert grown < MOST_MIB
