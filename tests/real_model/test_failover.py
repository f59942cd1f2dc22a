"""The real model on two verifiers and two gateways with one store: what is killed changes no text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream import AsyncClient
from slipstream.client.async_client import AsyncStream
from slipstream.client.completion import Completion
from slipstream.client.options import Message
from slipstream.serving.role import Role
from tests.e2e.conftest import starting
from tests.real_model.prompts import OWN

TOKENS, BEFORE = 48, 6
"""Tokens of a text, and of those that come before something is killed."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass
class System:
    gateways: list[Role]
    verifiers: list[Role]
    addresses: list[str]
    """Of the gateways."""


@pytest.fixture
async def system(smollm2: Path, redis_url: str) -> AsyncIterator[System]:
    async with starting() as (_, start):
        verifiers = [
            await start(
                "verifier_svc",
                VERIFIER_MODEL=str(smollm2),
                VERIFIER_LISTEN="127.0.0.1:0",
                VERIFIER_LOCAL_DRAFTERS="suffix",
            )
            for _ in range(2)
        ]
        settings = {
            "GATEWAY_VERIFIERS": ",".join(address for _, address in verifiers),
            "GATEWAY_DRAFTERS": "suffix=verifier:suffix",
            "GATEWAY_TOKENIZER": str(smollm2),
            "GATEWAY_STORE": redis_url,
            "GATEWAY_LEASE_S": "2",
            "GATEWAY_LISTEN": "127.0.0.1:0",
        }
        gateways = [await start("gateway", **settings) for _ in range(2)]
        roles = [role for role, _ in gateways], [role for role, _ in verifiers]
        yield System(*roles, [address for _, address in gateways])


def asked(client: AsyncClient, prompt: str, speculation: bool) -> AsyncStream:
    messages: list[Message] = [{"role": "user", "content": prompt}]
    return client.stream_chat(messages, max_tokens=TOKENS, temperature=0.8, seed=7, speculation=speculation)


async def undisturbed(client: AsyncClient, prompt: str) -> list[int]:
    """The text without a fault and without speculation."""
    async with asked(client, prompt, False) as stream:
        return (await stream.finish()).token_ids


async def disturbed(client: AsyncClient, prompt: str, victim: Role) -> Completion:
    """The text with speculation, in the middle of which the victim is killed, if it was not before."""
    async with asked(client, prompt, True) as stream:
        received = 0
        async for piece in stream:
            assert piece.offset == received
            received += len(piece.token_ids)
            if received >= BEFORE and victim.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(victim.process.pid, signal.SIGKILL)
        return stream.completion


async def test_a_gateway_that_is_killed_in_the_middle_changes_no_text(system: System) -> None:
    async with AsyncClient(system.addresses) as client:
        expected = await undisturbed(client, OWN[0])
        assert (await disturbed(client, OWN[0], system.gateways[0])).token_ids == expected
        assert system.gateways[0].process.returncode == -signal.SIGKILL
        assert await undisturbed(client, OWN[0]) == expected


async def test_a_verifier_that_is_killed_in_the_middle_changes_no_text(system: System) -> None:
    """Several texts run on both verifiers; those of the one that is lost go on on the other."""
    async with AsyncClient(system.addresses) as client:
        expected = [await undisturbed(client, prompt) for prompt in OWN[:4]]
        found = await asyncio.gather(*(disturbed(client, prompt, system.verifiers[0]) for prompt in OWN[:4]))
    assert [each.token_ids for each in found] == expected
    assert sum(each.finished.statistics.rehomed for each in found) > 0
