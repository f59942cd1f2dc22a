"""Sampling parameters of `generation_config.json`: which are taken, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.requests.sampling_defaults import read_sampling_defaults, with_defaults
from slipstream.errors import FailedPrecondition
from slipstream.v1.types_pb2 import SamplingOptions

QWEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "eos_token_id": [1, 2],
    "max_new_tokens": 2048,
}
"""As Qwen3's authors publish it."""


def written(folder: Path, content: Any) -> str:
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


def test_the_authors_parameters_are_taken_and_nothing_else(tmp_path: Path) -> None:
    assert read_sampling_defaults(str(tmp_path)) == SamplingOptions()
    assert read_sampling_defaults(written(tmp_path, QWEN)) == SamplingOptions(temperature=0.6, top_k=20, top_p=0.95)
    everything = {"top_k": -1, "min_p": 0.05, "repetition_penalty": 1.1, "temperature": None}
    assert read_sampling_defaults(written(tmp_path, everything)) == SamplingOptions(
        top_k=0, min_p=0.05, repetition_penalty=1.1
    )


@pytest.mark.parametrize(
    "content", ["{", "[]", {"temperature": "hot"}, {"temperature": -1}, {"top_k": 2.5}, {"top_p": 0}, {"top_k": -2}]
)
def test_a_file_of_something_else_is_refused_by_its_name(tmp_path: Path, content: Any) -> None:
    with pytest.raises(FailedPrecondition, match=r"generation_config\.json") as refused:
        read_sampling_defaults(written(tmp_path, content))
    assert refused.value.reason == "CONFIG_BROKEN"


def test_sampling_options_of_a_request_override_the_defaults_zero_included() -> None:
    defaults = SamplingOptions(temperature=0.6, top_k=20, top_p=0.95)
    assert with_defaults(SamplingOptions(), defaults) == defaults
    asked = SamplingOptions(temperature=0, top_k=0, seed=7)
    assert with_defaults(asked, defaults) == SamplingOptions(temperature=0, top_k=0, top_p=0.95, seed=7)
