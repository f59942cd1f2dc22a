"""The whole system with its models on a GPU: speculation changes no token in float32."""

from __future__ import annotations

import pytest
import torch

from benchmarks.load_generator import run_load
from benchmarks.processes import MODELS
from benchmarks.prompts import held_out, request
from slipstream.engine.factory import open_engine
from slipstream.errors import DEVICE_MEMORY
from tests.e2e.conftest import SPECULATING, accepting, serving, tokens
from tests.support.fleet import gateway, until, verifier
from tests.support.sampled_texts import assert_distributed

PROMPTS, TOKENS = 8, 48
ROOM_BYTES = 24 << 20
"""Enough for a pass over a few tokens, whatever blocks the allocator takes them from."""
WAYS = {
    "a draft model's process": ("--drafter", "model", "--no-draft-in-verifier"),
    "a draft model in the verifier": ("--drafter", "model", "--draft-in-verifier"),
    "lookups": ("--drafter", "ngram"),
    "EAGLE": ("--drafter", "eagle"),
    "Medusa": ("--drafter", "medusa"),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
async def test_speculation_changes_no_token(options: tuple[str, ...]) -> None:
    with serving("--dtype", "float32", *options, **SPECULATING) as server:
        for temperature in (0.0, 1.0):
            requests = [
                request(each, TOKENS, speculate=False, temperature=temperature, seed=3) for each in held_out(PROMPTS)
            ]
            plain = tokens(await run_load(server, requests, 4))
            for each in requests:
                each.speculation.disabled = False
            await accepting(server, requests, plain)


async def test_drawn_tokens_follow_the_target_distribution() -> None:
    with serving("--dtype", "float32", **SPECULATING) as server:
        await assert_distributed(server, "rejection", 10)


async def test_a_session_that_lacks_memory_ends_alone() -> None:
    """The long prompt is one pass, whose rows take more than the GPU has left; the short one's session goes on."""
    engine = open_engine(str(MODELS / "target"), "float32", 8192, device="cuda")
    at_once = {"prefill_tokens": 2000, "step_tokens": 2100}
    long, short = [3 + each % 4000 for each in range(1900)], list(range(3, 60))
    async with verifier(engine, **at_once) as server, gateway(server.address) as client:
        alone = await client.decode(short, tokens=16, cache_salt="alone")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + ROOM_BYTES) / torch.cuda.mem_get_info()[1]
        )
        try:
            lacking, beside = await client.open_at_once([long, short], tokens=16, cache_salt="beside")
            await until(lambda: lacking.done.is_set() and beside.done.is_set())
            assert lacking.end is not None and lacking.end.failure.reason == DEVICE_MEMORY
            assert beside.token_ids == alone.token_ids
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        again = await client.decode(long, tokens=16)
        assert len(again.token_ids) == 16
