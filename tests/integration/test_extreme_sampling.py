"""Numbers of a request at the ends of what their type can say, on the shipped model: each is served, or refused as the
client's fault, and none is the server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.support.emulated_system import EmulatedSystem, emulated_system

pytestmark = pytest.mark.asyncio(loop_scope="module")
FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
ENDS = (5e-324, 1e-50, 1e-40, 1e-30, 1e-7, 1.0, 2.0, 100.0, 3.5e38, 1.7e308)
VALUES = (*ENDS, -5e-324, -1e-40, -1.0, -2.0, -3.5e38, -0.0, 0.0)
BESIDE: tuple[dict[str, float], ...] = ({}, {"temperature": 1e-30, "repetition_penalty": 1e-30})
ASKED = [{**beside, name: value} for name in FIELDS for value in VALUES for beside in BESIDE]
AT_ONCE = 16


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def system() -> AsyncIterator[EmulatedSystem]:
    engine = open_engine("models/target", "float32", 60_000)
    async with emulated_system(engine, open_engine("models/draft", "float32", 60_000)) as system:
        yield system


async def test_grpc_answers_every_number_with_a_text_or_a_refusal(system: EmulatedSystem) -> None:
    free = asyncio.Semaphore(AT_ONCE)
    async with channel(system.gateway.address) as line:
        stub = gateway_pb2_grpc.GatewayServiceStub(line)

        async def ask(sampling: dict[str, Any]) -> str:
            options = gateway_pb2.SamplingOptions(seed=1, **sampling)
            request = gateway_pb2.GenerateRequest(prompt="def f(", max_tokens=4, ignore_eos=True, sampling=options)
            async with free:
                try:
                    tokens = [token async for each in stub.Generate(request) for token in each.delta.token_ids]
                except grpc.RpcError as error:
                    return str(error.code().name)  # type: ignore[attr-defined]
            return "text" if len(tokens) == 4 else f"{len(tokens)} tokens"

        biases = [{"logit_bias": {5: value}, "repetition_penalty": 1.1} for value in VALUES]
        rules = [
            {"temperature": value, "acceptance": types_pb2.ACCEPTANCE_RULE_TYPICAL} for value in VALUES if value >= 0.0
        ]
        asked = [*ASKED, *biases, *rules]
        answers = await asyncio.gather(*map(ask, asked))
    wrong = [pair for pair in zip(asked, answers, strict=True) if pair[1] not in ("text", "INVALID_ARGUMENT")]
    assert not wrong
    assert answers.count("text") > len(asked) // 4 and answers.count("INVALID_ARGUMENT") > len(asked) // 4


async def test_http_answers_every_number_with_a_text_or_a_refusal(system: EmulatedSystem) -> None:
    free = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=system.url, timeout=120, trust_env=False, limits=limits) as client:

        async def ask(field: str, value: str) -> int:
            body = f'{{"prompt": "def f(", "max_tokens": 3, "seed": 1, "{field}": {value}}}'
            async with free:
                answer = await client.post(
                    "/v1/completions", content=body, headers={"content-type": "application/json"}
                )
            return answer.status_code

        written = [*map(repr, VALUES), "1e400", "-1e400", "1" + 400 * "0", "1e-400", "NaN", "Infinity"]
        asked = [(field, value) for field in FIELDS for value in written]
        asked += [("logit_bias", f'{{"5": {value}}}') for value in written]
        statuses = await asyncio.gather(*(ask(*each) for each in asked))
    assert not [pair for pair in zip(asked, statuses, strict=True) if pair[1] not in (200, 400)]
    assert {200, 400} == {*statuses}
