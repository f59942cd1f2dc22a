"""Two API keys on real processes: one fills the verifier's KV, the other's texts come all the same. Steps are counted
and not seconds: each step gives every text that is in it a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.client.gateway_endpoint import GatewayEndpoint, digest
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.conftest import ROOT, UNMEASURED, starting
from tests.support.fleet import emulated_text
from tests.support.follower import Follower

KV_TOKENS = 6400
LONG = 1500
"""Tokens of each of three texts, which together with their prompts outgrow the KV."""
KEYS = {"many": "a" * 40, "few": "b" * 40}


@asynccontextmanager
async def stubs_of_keys(
    folder: Path, verifier_settings: dict[str, str]
) -> AsyncIterator[dict[str, gateway_pb2_grpc.GatewayServiceStub]]:
    """A gateway with one verifier, by the name of the API key that the calls carry."""
    keys = folder / "keys.toml"
    keys.write_text("".join(f'{name} = {{ sha256 = "{digest(key).hex()}" }}\n' for name, key in KEYS.items()))
    async with starting() as (stack, start):
        _, verifier = await start("verifier_svc", VERIFIER_LISTEN="127.0.0.1:0", **verifier_settings)
        _, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
            GATEWAY_API_KEYS=str(keys),
        )
        yield {
            name: gateway_pb2_grpc.GatewayServiceStub(
                await stack.enter_async_context(GatewayEndpoint(address, key).channel())
            )
            for name, key in KEYS.items()
        }


async def test_a_key_that_fills_the_kv_keeps_no_other_key_s_texts_waiting(tmp_path: Path) -> None:
    settings = {"VERIFIER_MODEL": "emulated:base_ms=20", "VERIFIER_KV_TOKENS": str(KV_TOKENS)} | UNMEASURED
    async with stubs_of_keys(tmp_path, settings) as stubs:
        many = [Follower(stubs["many"], [first, *[9] * 999], LONG) for first in range(3)]
        async with asyncio.timeout(120):
            while not all(text.tokens for text in many):
                await asyncio.sleep(0.01)
        waiting = Follower(stubs["many"], [4, *[9] * (KV_TOKENS - 100)], 50)  # fits when nearly all else has ended
        while not waiting.session_id:
            await asyncio.sleep(0.01)
        for number in range(3):
            text = Follower(stubs["few"], [10 + number, 8], 10)
            await text.reading
            assert text.tokens == emulated_text(text.prompt, 10)
            assert not any(other.reading.done() for other in (*many, waiting)), "it waited for another key's"
        for other in (*many, waiting):
            await other.end()


async def test_beside_long_prompts_of_one_key_another_key_s_texts_get_a_token_a_step(tmp_path: Path) -> None:
    """A step with a piece of a prompt takes a token of the text too, and no more of the prompt than takes as long."""
    async with stubs_of_keys(tmp_path, {"VERIFIER_MODEL": "emulated:base_ms=4&token_ms=0.5&flat=16"}) as stubs:
        text = Follower(stubs["few"], [1, 8], 4000)
        while not text.tokens:
            await asyncio.sleep(0.01)
        many = [Follower(stubs["many"], [first, *[9] * 1999], 2) for first in range(2, 6)]
        while not all(other.session_id for other in many):
            await asyncio.sleep(0.01)
        before = len(text.tokens)
        await asyncio.gather(*(other.reading for other in many))
        steps = len(text.tokens) - before
        # 8,000 tokens of prompts; 256 in a step would be 32 steps.
        assert steps >= 80, steps
        record = await stubs["few"].GetSession(gateway_pb2.GetSessionRequest(session_id=text.session_id))
        assert record.statistics.rehomed == 0
        await text.end()
