"""Through the whole running system: what sessions wrote helps later ones, and changes no token."""

from __future__ import annotations

from benchmarks.prompts import held_out, request
from slipstream.load import Load, run_load
from tests.e2e.conftest import serving

TOKENS = 40


async def test_what_was_written_once_is_guessed_the_next_time() -> None:
    prompts = held_out(3, seed=6)

    async def decoded(server: str, speculate: bool) -> Load:
        requests = [request(prompt, TOKENS, speculate=speculate) for prompt in prompts]
        return await run_load(server, requests, 1)

    with serving("--dtype", "float32", "--drafter=suffix") as server:
        first, second, plain = [await decoded(server, speculate) for speculate in (True, True, False)]
    texts = [[completion.token_ids for completion in load.completions] for load in (first, second, plain)]
    assert texts[0] == texts[1] == texts[2]
    assert second.total("accepted") > max(first.total("accepted"), 0.4 * TOKENS * len(prompts))
