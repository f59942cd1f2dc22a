"""What Slipstream fixes of vLLM's options, and which models it serves by vLLM; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.vllm.engine import DRAFTER
from slipstream.engine.vllm.options import (
    FIXED,
    VLLMRole,
    check_cache,
    check_layers,
    check_version,
    checked_words,
    refusal,
)
from slipstream.errors import FailedPrecondition, InvalidArgument

TARGETS = VLLMRole("verifier", "target")


def test_options_of_vllm_are_split_like_shell_words() -> None:
    assert checked_words(DRAFTER, "--quantization fp8 --name 'two words'", "") == [
        "--quantization", "fp8", "--name", "two words",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("of", "given", "sentence"),
    [
        (TARGETS, "--dtype=float16", "VERIFIER_VLLM_ARGS holds --dtype, which cannot be set: it is VERIFIER_DTYPE."),
        (DRAFTER, "--dtype float16", "DRAFTER_VLLM_ARGS holds --dtype, which cannot be set: it is DRAFTER_DTYPE."),
        (DRAFTER, "--tensor_parallel_size 2", "holds --tensor-parallel-size, .*: a draft model runs on one device."),
        (DRAFTER, "--data-parallel-size 2", "start one drafter for each replica."),
        (TARGETS, "'open", "VERIFIER_VLLM_ARGS cannot be read: No closing quotation."),
    ],
)
def test_options_of_vllm_that_may_not_be_given_are_refused_by_name(of: VLLMRole, given: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        checked_words(of, given, "")


def test_a_target_may_be_divided_and_a_draft_model_may_not() -> None:
    assert checked_words(TARGETS, "--tensor-parallel-size 2", "") == ["--tensor-parallel-size", "2"]
    assert {"--tensor-parallel-size", "-tp"} <= set(DRAFTER.fixed) - set(FIXED)


def test_the_embedded_engine_s_quantisation_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"DRAFTER_QUANTISATION is for the embedded engine; .*DRAFTER_VLLM_ARGS"):
        checked_words(DRAFTER, "", "int8")


def spec(kind: str, **settings: Any) -> Any:
    return type(kind, (), {"tokens_per_state": 1} | settings)()


@pytest.mark.parametrize(
    ("tables", "layers", "sentence"),
    [
        (1, [spec("FullAttentionSpec"), spec("SlidingWindowSpec")], ""),
        (1, [spec("MLAAttentionSpec")], r"\(MLAAttentionSpec\)"),
        (2, [spec("FullAttentionSpec")], r"a KV cache in 2 tables of blocks \(each of its own\): it is not served"),
        (1, [spec("FullAttentionSpec"), spec("MambaSpec")], r"1 tables of blocks \(MambaSpec\)"),
        (1, [spec("FullAttentionSpec", non_causal=True)], r"\(FullAttentionSpec\)"),
    ],
)
def test_a_draft_model_has_one_row_of_kv_for_each_token(tables: int, layers: list[Any], sentence: str) -> None:
    if not sentence:
        check_cache(DRAFTER, tables, layers)
        return
    with pytest.raises(FailedPrecondition, match=f"this draft model has .*{sentence}"):
        check_cache(DRAFTER, tables, layers)


def test_a_model_with_recurrent_layers_is_refused_before_its_weights_are_read() -> None:
    plain = {"is_hybrid": False, "has_inner_state": False, "is_attention_free": False}
    check_layers(DRAFTER, SimpleNamespace(**plain))
    for name in plain:
        with pytest.raises(FailedPrecondition, match="this draft model has recurrent layers"):
            check_layers(DRAFTER, SimpleNamespace(**(plain | {name: True})))


def test_errors_of_vllm_are_shortened_to_a_sentence() -> None:
    said = "ValidationError: 1 error\n  Value error, no such method. [type=value_error, input={'a': 1}]"
    assert refusal(DRAFTER, said).message == (
        "vLLM cannot serve this draft model: ValidationError: 1 error Value error, no such method."
    )


def test_another_minor_version_is_refused() -> None:
    check_version("0.32.7")
    with pytest.raises(FailedPrecondition, match=r"vLLM 0\.33\.0 is installed"):
        check_version("0.33.0")
