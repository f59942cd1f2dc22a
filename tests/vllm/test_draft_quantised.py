"""Draft models that were quantised beforehand, on vLLM's CPU build: they draft, or are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.factory import open_engine
from slipstream.errors import FailedPrecondition
from slipstream.proposers.base import Proposal
from slipstream.proposers.chain_model import ChainProposer
from slipstream.proposers.draft_model import ModelProposer
from tests.support.chains import LEVELS, assert_same, chain_of, context
from tests.vllm.decoding import SAMPLINGS, TARGET, prompts
from tests.vllm.quantised import configure, save_int8
from tests.vllm.test_draft_chains import open_draft
from tests.vllm.test_quantised import BITSANDBYTES, FP8


def test_int8_weights_draft_as_well_and_as_consistently_as_others(tmp_path: Path) -> None:
    """Most chains begin as with unrounded weights, and not all confidences are theirs."""
    engine = open_draft(model=str(save_int8(tmp_path)))
    try:
        assert engine.model.dtype == "compressed-tensors/float32"
        chains, apart = (ChainProposer(engine, width=4, proposal_tokens=32) for _ in range(2))
        unrounded = ModelProposer(open_engine(TARGET, "float32", 4096), width=4, proposal_tokens=32)
        asked = [
            context(number, list(prompt), len(prompt), SAMPLINGS[number % 2], LEVELS)
            for number, prompt in enumerate(prompts(8))
        ]
        alike = 0
        for one, answer in zip(asked, chains.propose(asked), strict=True):
            assert isinstance(answer, Proposal)
            assert_same(answer.nodes, chain_of(apart, one))
            exact = chain_of(unrounded, one)
            alike += exact[0].token == answer.nodes[0].token
            assert exact[0].log_prob != answer.nodes[0].log_prob
        assert alike > len(asked) / 2
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("quantisation", "sentence"),
    [
        (BITSANDBYTES, r"Unknown quantization method: bitsandbytes\. Must be one of"),
        (FP8, r"float32 is not supported for quantization method fp8\. Supported dtypes: "),
    ],
    ids=["a method of another build", "numbers of another type"],
)
def test_a_quantisation_that_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, quantisation: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FailedPrecondition, match=f"vLLM cannot serve this draft model: .*{sentence}"):
        open_draft(model=str(configure(tmp_path, quantisation)))
