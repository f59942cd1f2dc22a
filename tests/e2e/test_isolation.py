"""What one client sends ends no text of another one: real processes, and a gateway that has one verifier only."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from slipstream.rpc.channel import MAX_MESSAGE_BYTES, channel, error_of
from slipstream.rpc.multiplexed_stream import TOO_LARGE
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.conftest import ROOT, UNMEASURED, starting
from tests.fleet import emulated_text
from tests.follower import Follower

TWO_BYTES = 200
"""A token's id that takes two bytes in a message."""
TOKENS = 120


def largest_request() -> gateway_pb2.GenerateRequest:
    """A request of gRPC's largest size, whose prompt and prediction no message to a verifier can hold."""
    half = MAX_MESSAGE_BYTES // 4
    made = gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(token_ids=[TWO_BYTES] * (half - 100)),
        prediction=gateway_pb2.Prediction(token_ids=gateway_pb2.TokenIds(token_ids=[TWO_BYTES] * (half - 100))),
        max_tokens=1,
    )
    room = MAX_MESSAGE_BYTES - 8 - made.ByteSize()
    made.prompt_token_ids.token_ids.extend([TWO_BYTES] * min(99, room // 2))
    made.prediction.token_ids.token_ids.extend([TWO_BYTES] * ((MAX_MESSAGE_BYTES - 8 - made.ByteSize()) // 2))
    assert MAX_MESSAGE_BYTES - 16 < made.ByteSize() < MAX_MESSAGE_BYTES
    return made


async def test_requests_too_large_for_a_stream_are_refused_and_others_texts_end_where_they_began() -> None:
    async with starting() as (stack, start):
        settings = {"MODEL": "emulated:base_ms=20", "LISTEN": "127.0.0.1:0", "KV_TOKENS": "4000000"}
        _, verifier = await start(
            "verifier_svc", **{f"VERIFIER_{name}": value for name, value in settings.items()}, **UNMEASURED
        )
        _, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
            GATEWAY_MAX_PROMPT_BYTES=str(MAX_MESSAGE_BYTES),  # requests as large as its clients may send
            GATEWAY_REHOMING_WAIT_S="120",
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(await stack.enter_async_context(channel(address)))
        texts = [Follower(stub, [first, 8, 9], TOKENS) for first in range(3)]
        async with asyncio.timeout(120):
            while not all(text.tokens for text in texts):
                await asyncio.sleep(0.01)
        for _ in range(6):
            with pytest.raises(grpc.RpcError) as refused:
                async for _ in stub.Generate(largest_request(), timeout=120):
                    pass
            assert error_of(refused.value).reason == TOO_LARGE, refused.value
        await asyncio.gather(*(text.reading for text in texts))
        for text in texts:
            assert text.tokens == emulated_text(text.prompt, TOKENS)
            record = await stub.GetSession(gateway_pb2.GetSessionRequest(session_id=text.session_id))
            assert record.statistics.rehomed == 0
