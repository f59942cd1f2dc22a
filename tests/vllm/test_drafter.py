"""A drafter on vLLM as people start it, beside a verifier on vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.load_generator import run_load
from slipstream.client.client import complete
from slipstream.client.gateway_endpoint import GatewayEndpoint
from tests.vllm.system import PROMPTS, generate, requests, texts_of
from tests.vllm.test_serving import serving

TOKENS = 96


async def test_a_pair_on_vllm_gives_the_text_without_candidates_and_outlives_its_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VERIFIER_ALWAYS_SPECULATE", "true")
    with serving("--engine", "vllm", "--draft-engine", "vllm", "--drafter", "model", "--dtype", "float32") as server:
        plain = await generate(server, requests(TOKENS, speculate=False))
        drafted = await run_load(server, requests(TOKENS), len(PROMPTS))
        assert texts_of(drafted) == plain
        assert drafted.total("accepted") > 0
        (drafter,) = drafters()
        async with GatewayEndpoint(server).channel() as channel:
            found = await asyncio.gather(
                *(complete(channel, each, lambda _: kill(drafter)) for each in requests(TOKENS))
            )
        assert [each.token_ids for each in found] == plain
        assert not drafter.is_running()


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def drafters() -> list[psutil.Process]:
    """The drafters below this process that run in its environment, by whatever path it was found."""
    environment = Path(sys.executable).parent.resolve()
    below = [(each, each.cmdline()) for each in psutil.Process().children(recursive=True)]
    return [each for each, line in below if "drafter_svc" in line and Path(line[0]).parent.resolve() == environment]
