"""`slipstream serve --draft-in-verifier`: no drafter process, and the same text."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.load_generator import LoadResult, run_load
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import SPECULATING, serving

PROMPTS = ["def read(self, path):\n", "class Queue:\n    def __init__(self):\n"]


def texts(server: str, *drafters: str) -> LoadResult:
    requests = [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=96,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(temperature=temperature, seed=7),
            speculation=gateway_pb2.SpeculationOptions(disabled=not drafters, drafters=drafters),
        )
        for prompt in PROMPTS
        for temperature in (0.0, 0.8)
    ]
    return asyncio.run(run_load(server, requests, 2))


@pytest.mark.timeout(300)
def test_drafters_in_the_verifier_s_process_change_no_token(server: str) -> None:
    options = ("--draft-in-verifier", "--drafter", "model", "--drafter", "ngram", "--dtype", "float32")
    with serving(*options, **SPECULATING) as inside:
        plain, guessed = texts(inside), texts(inside, "model", "ngram")
    apart = texts(server, "model")
    assert [each.token_ids for each in guessed.completions] == [each.token_ids for each in plain.completions]
    assert [each.token_ids for each in apart.completions] == [each.token_ids for each in plain.completions]
