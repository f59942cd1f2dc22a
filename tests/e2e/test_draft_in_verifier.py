"""`slipstream serve --draft-in-verifier`: no drafter process, and the same text."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.load_generator import LoadResult, run_load
from slipstream import Client
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


def drafters(server: str) -> list[str]:
    with Client(server) as client:
        return [drafter.name for drafter in client.models()[0].drafters]


@pytest.mark.timeout(300)
def test_drafters_in_the_verifier_s_process_change_no_token(server: str) -> None:
    with serving("--draft-in-verifier", "--dtype", "float32", **SPECULATING) as inside:
        assert drafters(inside) == ["model", "suffix"], "where none is named"
        plain, guessed = texts(inside), texts(inside, "model", "suffix")
    assert drafters(server) == ["model"], "where nothing drafts in the verifier"
    apart = texts(server, "model")
    assert [each.token_ids for each in guessed.completions] == [each.token_ids for each in plain.completions]
    assert [each.token_ids for each in apart.completions] == [each.token_ids for each in plain.completions]
