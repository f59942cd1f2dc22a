"""What calls of gRPC hold while their requests come in: by the bytes that a gateway lets through, and on one as a
process of its own by the most memory that it had meanwhile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gateway.api.grpc_service import MOST_RECEIVED
from slipstream.client.gateway_endpoint import digest
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import starting
from tests.isolation.held_requests import HeldRequests
from tests.isolation.scribe import SCRIBE, TARGET, scribe
from tests.isolation.system import peak_mib
from tests.support.scripted_verifier import served

KEY = "a" * 40
GENERATE = "/slipstream.v1.GatewayService/Generate"
CALLS = 150
"""At a time, each with almost as much as gRPC lets through: 590 MB in all."""
WINDOW_BYTES = 1 << 16
"""That flow control lets through of a call whose request is not read yet."""
MOST_MIB = 40
"""Beside what was sent."""


@pytest.mark.parametrize(
    ("metadata", "received", "status"),
    [((), 0, 16), ((("authorization", f"Bearer {KEY}"),), MOST_RECEIVED, 3)],
    ids=["without a key", "with a key"],
)
async def test_large_calls_at_a_time_hold_a_bounded_part_of_the_memory(
    tmp_path: Path, metadata: tuple[tuple[str, str], ...], received: int, status: int
) -> None:
    (tmp_path / "keys.toml").write_text(f'alice = {{ sha256 = "{digest(KEY).hex()}" }}\n')
    request = gateway_pb2.GenerateRequest(prompt="x" * (MAX_MESSAGE_BYTES - 100_000), model=SCRIBE).SerializeToString()
    async with served(scribe()) as (verifier, _), starting() as (_, start):
        role, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_TOKENIZER=str(TARGET),
            GATEWAY_API_KEYS=str(tmp_path / "keys.toml"),
            GATEWAY_FAILED_KEYS_PER_MINUTE="0",
        )
        requests = await HeldRequests.connect(address)
        requests.call(GENERATE, b"", metadata)
        await requests.until_quiet()
        peak_mib(role)
        before = peak_mib(role)
        for _ in range(CALLS):
            requests.call(GENERATE, request, metadata)
        await requests.until_quiet()
        sent, held = requests.sent, peak_mib(role) - before
        await requests.release()
        most = peak_mib(role) - before
        await requests.close()
    assert Counter(requests.statuses.values())[str(status)] >= CALLS
    assert sent < received * len(request) + (CALLS + 1) * WINDOW_BYTES
    assert held < sent / 2**20 + MOST_MIB
    # gRPC copies what has come in: twice where all came at a time.
    assert most < 2 * received * len(request) / 2**20 + MOST_MIB
