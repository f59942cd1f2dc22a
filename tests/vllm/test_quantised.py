"""Checkpoints quantised beforehand, on vLLM's CPU build: served as exactly as others, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import FailedPrecondition
from tests.vllm.conftest import open_executor
from tests.vllm.decoding import SAMPLINGS, Case, Decoding, decode, guesses, prompts, texts
from tests.vllm.quantised import configure, save_int8

CASES = [Case(prompt, sampling, 24) for prompt, sampling in zip(prompts(8), SAMPLINGS, strict=True)]
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = save_int8(tmp_path_factory.mktemp("int8"))
    opened = open_executor(
        model=str(folder), kv_tokens=4096, vllm_args="--quantization compressed-tensors --max-num-seqs 8"
    )
    yield opened
    opened.close()


def test_an_int8_checkpoint_has_one_text_whatever_is_drafted(quantised: Any, embedded: Any) -> None:
    """It is the target's in most of its first tokens, and its own later: the weights are rounded."""
    assert quantised.limits.max_sequences == len(CASES)
    plain, unrounded = texts(decode(quantised, CASES)), texts(decode(embedded, CASES))
    assert sum(plain[case][0] == unrounded[case][0] for case in CASES) > len(CASES) / 2
    assert plain != unrounded
    for right in (1.0, 0.8, 0.0):
        decoded = decode(quantised, CASES, guesses(plain, right), seed=3, skipped=0.2)
        assert texts(decoded) == plain
        accepted, drafted = (sum(getattr(each, name) for each in decoded.values()) for name in ("accepted", "drafted"))
        assert drafted > 0 and (accepted == drafted) == (right == 1.0) and (accepted == 0) == (right == 0.0)
    assert quantised.kv.blocks_free == quantised.kv.blocks_total


def test_more_sessions_than_a_worker_holds_at_once_take_turns(quantised: Any) -> None:
    """It drops those that waited longest, which are sent anew."""
    plain = texts(decode(quantised, CASES))
    turns = [Decoding(quantised, guesses(plain, 0.8)) for _ in range(2)]
    for case in CASES:
        for each in turns:
            each.open(case)
    while any(each.live for each in turns):
        for each in turns:
            each.step()
    assert all(texts(each.decoded) == plain for each in turns)


@pytest.mark.parametrize(
    ("quantisation", "options", "sentence"),
    [
        (BITSANDBYTES, "", r"Unknown quantization method: bitsandbytes\. Must be one of"),
        (FP8, "", r"float32 is not supported for quantization method fp8\. Supported dtypes: "),
        (GPTQ, "--quantization fp8", r"in the model config \(gptq\) does not match .* `quantization` argument \(fp8\)"),
    ],
    ids=["a method of another build", "numbers of another type", "another method's option"],
)
def test_a_quantisation_that_cannot_run_is_refused_with_the_reason(
    tmp_path: Path, quantisation: dict[str, Any], options: str, sentence: str
) -> None:
    with pytest.raises(FailedPrecondition, match=f"vLLM cannot serve this target: .*{sentence}"):
        open_executor(model=str(configure(tmp_path, quantisation)), kv_tokens=1024, vllm_args=options)


def test_numbers_that_no_kernel_multiplies_are_refused_with_the_worker_s_reason(tmp_path: Path) -> None:
    """Only a worker finds out, when it builds the layers."""
    folder = configure(tmp_path, GPTQ)
    with pytest.raises(FailedPrecondition, match=r"vLLM cannot serve this target: .*uint8b128.* supported"):
        open_executor(model=str(folder), kv_tokens=1024, dtype="bfloat16")
