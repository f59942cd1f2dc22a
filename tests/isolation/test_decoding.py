"""What one key's long texts and prompts do to another key's texts, on real processes whose models are emulated.

Passes of an emulated model take a known time and no core's, so that what the schedulers of verifier and drafter give
each key is measured, and not how processes of both keys' work share two cores. A step takes longer with each token, as
on CPUs. `test_neighbour` has the same attacks on the shipped pair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import pytest

from slipstream.client.gateway_endpoint import GatewayEndpoint, digest
from slipstream.v1 import gateway_pb2_grpc
from tests.e2e.conftest import ROOT, starting
from tests.support.follower import Follower

pytestmark = pytest.mark.slow

KEYS = {"many": "a" * 40, "one": "b" * 40}
TARGET = "emulated:base_ms=12&token_ms=2"
DRAFT = "emulated:base_ms=2&token_ms=0.1&acceptance=0.8"
TOKENS, TEXTS = 120, 3
"""Of each of the neighbour's texts, and how many there are."""
MOST, NOISE_S = 2.0, 0.002
"""Times as long; seconds of a token that are not counted: two clients and a gateway wake up on the same cores."""


@asynccontextmanager
async def two_keys(folder: Path) -> AsyncIterator[dict[str, gateway_pb2_grpc.GatewayServiceStub]]:
    keys = folder / "keys.toml"
    keys.write_text("".join(f'{name} = {{ sha256 = "{digest(key).hex()}" }}\n' for name, key in KEYS.items()))
    async with starting() as (_, start):
        (_, verifier), (_, drafter) = await asyncio.gather(
            start("verifier_svc", VERIFIER_LISTEN="127.0.0.1:0", VERIFIER_MODEL=TARGET),
            start("drafter_svc", DRAFTER_LISTEN="127.0.0.1:0", DRAFTER_MODEL=DRAFT),
        )
        _, address = await start(
            "gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_VERIFIERS=verifier,
            GATEWAY_DRAFTERS=f"model={drafter}",
            GATEWAY_TOKENIZER=str(ROOT / "models" / "target"),
            GATEWAY_API_KEYS=str(keys),
        )
        async with AsyncExitStack() as channels:
            yield {
                name: gateway_pb2_grpc.GatewayServiceStub(
                    await channels.enter_async_context(GatewayEndpoint(address, key).channel())
                )
                for name, key in KEYS.items()
            }


async def tpot(stub: gateway_pb2_grpc.GatewayServiceStub, first: int) -> float:
    """The middle of several texts."""
    found: list[float] = []
    for number in range(TEXTS):
        text = Follower(stub, [first + number, 8], TOKENS)
        while not text.tokens:
            await asyncio.sleep(0.001)
        began, had = asyncio.get_running_loop().time(), len(text.tokens)
        await text.reading
        found.append((asyncio.get_running_loop().time() - began) / (TOKENS - had))
    return median(found)


@pytest.mark.parametrize(("texts", "prompts"), [(1, 0), (4, 0), (16, 0), (0, 8), (4, 4)], ids=lambda each: str(each))
async def test_another_key_s_tokens_take_at_most_twice_as_long(tmp_path: Path, texts: int, prompts: int) -> None:
    async with two_keys(tmp_path) as stubs:
        await tpot(stubs["one"], 50)
        alone = [await tpot(stubs["one"], 60)]
        many = [Follower(stubs["many"], [number, 8], 20_000) for number in range(texts)]
        many += [Follower(stubs["many"], [30 + number, *[9] * 20_000], 2) for number in range(prompts)]
        while not all(text.tokens for text in many[:texts]):
            await asyncio.sleep(0.01)
        attacked = await tpot(stubs["one"], 70)
        assert not any(text.reading.done() for text in many), "the attack has ended before"
        for text in many:
            await text.end()
        alone.append(await tpot(stubs["one"], 80))
    quiet = sum(alone) / len(alone)
    print(f"\n{texts} texts, {prompts} prompts: TPOT {1e3 * quiet:.1f} ms alone, {1e3 * attacked:.1f} ms beside them")
    assert attacked <= MOST * quiet + NOISE_S
