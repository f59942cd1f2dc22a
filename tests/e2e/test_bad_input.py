"""Bad input gets a typed status and a sentence that explains what to do; no other session notices."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from benchmarks.prompts import request
from slipstream.client.client import complete
from slipstream.errors import SlipstreamError
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Request = gateway_pb2.GenerateRequest
Options = gateway_pb2.SamplingOptions

CASES = {
    "empty prompt": (Request(prompt=""), INVALID),
    "no prompt": (Request(), INVALID),
    "empty token ids": (Request(prompt_token_ids=gateway_pb2.TokenIds()), INVALID),
    "prompt longer than the model": (Request(prompt="x = 1\n" * 5000), INVALID),
    "token outside the vocabulary": (Request(prompt_token_ids=gateway_pb2.TokenIds(token_ids=[10**6])), INVALID),
    "negative temperature": (Request(prompt="x", sampling=Options(temperature=-1.0)), INVALID),
    "NaN temperature": (Request(prompt="x", sampling=Options(temperature=math.nan)), INVALID),
    "infinite temperature": (Request(prompt="x", sampling=Options(temperature=math.inf)), INVALID),
    "top_p of zero": (Request(prompt="x", sampling=Options(top_p=0.0)), INVALID),
    "min_p above one": (Request(prompt="x", sampling=Options(min_p=1.5)), INVALID),
    "zero repetition penalty": (Request(prompt="x", sampling=Options(repetition_penalty=0.0)), INVALID),
    "NaN bias": (Request(prompt="x", sampling=Options(logit_bias={1: math.nan})), INVALID),
    "bias outside the vocabulary": (Request(prompt="x", sampling=Options(logit_bias={10**6: 1.0})), INVALID),
    "no output tokens": (Request(prompt="x", max_tokens=0), INVALID),
    "empty stop string": (Request(prompt="x", stop=[""]), INVALID),
    "too many stop strings": (Request(prompt="x", stop=[str(i) for i in range(100)]), INVALID),
    "unknown model": (Request(prompt="x", model="no-such-model"), grpc.StatusCode.NOT_FOUND),
    "unknown drafter": (
        Request(prompt="x", speculation=gateway_pb2.SpeculationOptions(drafters=["nobody"])),
        grpc.StatusCode.NOT_FOUND,
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_bad_requests_are_refused_with_a_sentence(server: str, name: str) -> None:
    bad, code = CASES[name]
    good = request("def f(", 24, speculate=True)
    async with channel(server) as line:
        healthy = asyncio.create_task(complete(line, good))
        with pytest.raises(SlipstreamError) as refusal:
            await complete(line, bad)
        assert refusal.value.code is code
        assert len(refusal.value.message) > 15 and refusal.value.reason
        assert len((await healthy).token_ids) == 24


async def test_unknown_sessions_are_not_found(server: str) -> None:
    async with channel(server) as line:
        stub = gateway_pb2_grpc.GatewayServiceStub(line)
        for call in (
            stub.GetSession(gateway_pb2.GetSessionRequest(session_id="nobody")),
            stub.Cancel(gateway_pb2.CancelRequest(session_id="nobody")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call
            assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_oversized_request_is_refused_and_the_server_lives_on(server: str) -> None:
    async with channel(server) as line:
        stub = gateway_pb2_grpc.GatewayServiceStub(line)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Tokenize(gateway_pb2.TokenizeRequest(text="x" * (5 * 1024 * 1024)))
        assert refusal.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, INVALID)
        assert list((await stub.Tokenize(gateway_pb2.TokenizeRequest(text="x = 1"))).token_ids)
