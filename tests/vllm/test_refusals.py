"""What vLLM or its workers refuse reaches the operator as one sentence."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from slipstream.engine.vllm.options import check_cache
from slipstream.errors import FailedPrecondition, InvalidArgument
from tests.vllm.conftest import open_executor
from tests.vllm.system import LIMIT_S, until, workers
from verifier_svc.execution.vllm.engine_options import VERIFIER


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--no-such-option", "VERIFIER_VLLM_ARGS cannot be read: unrecognized arguments: --no-such-option"),
        ("--tensor-parallel-size many", "VERIFIER_VLLM_ARGS cannot be read: .*invalid int value"),
        ("--speculative-config {}", "--speculative-config, which cannot be set: it is VERIFIER_VLLM_SPECULATOR"),
        ("--trust-remote-code", "--trust-remote-code, which cannot be set: code of a checkpoint is never run"),
        ("--trust-remote", "unrecognized arguments: --trust-remote"),
        ("--decode-context-parallel-size=2", "-size, which cannot be set: a block holds the tokens of one rank"),
        ("--config options.yaml", "--config, which cannot be set: options stand in VERIFIER_VLLM_ARGS itself"),
        ("--enable-lora", "--enable-lora, which cannot be set: adapters are not served; merge one into its checkpoint"),
        ("--no-disable-hybrid-kv-cache-manager", "which cannot be set: a session has one table of KV blocks"),
        ("-pp 2", "-pp, which cannot be set: pipelines of steps are not supported"),
        ("--help", "VERIFIER_VLLM_ARGS holds --help or another option that ends the program"),
        ("'open quote", "VERIFIER_VLLM_ARGS cannot be read: No closing quotation"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        open_executor(vllm_args=options)


def test_an_option_of_vllm_that_does_not_fit_the_model_is_its_own_sentence() -> None:
    with pytest.raises(
        FailedPrecondition, match=r"vLLM cannot serve this target: .*Cannot find the config file for awq\.$"
    ):
        open_executor(vllm_args="--quantization awq")


def test_a_worker_s_refusal_is_its_own_sentence() -> None:
    """The KV cache does not fit the machine: only a worker finds out."""
    with pytest.raises(FailedPrecondition, match=r"vLLM cannot serve this target: .*[Mm]emory"):
        open_executor(vllm_args=f"--kv-cache-memory-bytes {1 << 50}")


def test_a_worker_that_is_killed_while_it_starts_is_reported() -> None:
    kill = threading.Thread(target=kill_next_worker)
    kill.start()
    with pytest.raises(FailedPrecondition, match="a worker ended at its start without a word"):
        open_executor(kv_tokens=1024)
    kill.join()


def kill_next_worker() -> None:
    known = workers(os.getpid())
    until(lambda: len(workers(os.getpid())) > len(known), LIMIT_S)
    for process in workers(os.getpid()):
        if process not in known:
            process.kill()


def test_a_kv_cache_that_is_not_a_row_for_each_token_of_one_table_is_refused() -> None:
    from vllm.v1 import kv_cache_interface as vllm

    heads: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = vllm.FullAttentionSpec(**heads)
    window, chunked = (
        vllm.SlidingWindowSpec(**heads, sliding_window=4),
        vllm.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=4),
    )
    check_cache(VERIFIER, 1, [full, window, full])
    check_cache(VERIFIER, 1, [full, chunked])
    recurrent = vllm.MambaSpec(block_size=16, shapes=((1, 2),), dtypes=(torch.float32,))
    others = [
        (recurrent, "MambaSpec"),
        (vllm.RSWASpec(**heads, rswa_window=4), "RSWASpec"),
        (vllm.SinkFullAttentionSpec(**heads, sink_len=2), "SinkFullAttentionSpec"),
        (vllm.CrossAttentionSpec(**heads), "CrossAttentionSpec"),
        (vllm.MLAAttentionSpec(**heads), "MLAAttentionSpec"),
        (vllm.FullAttentionSpec(**heads, non_causal=True), "FullAttentionSpec"),
    ]
    for spec, name in others:
        with pytest.raises(FailedPrecondition, match=rf"this target has a KV cache .*\({name}\): it is not served"):
            check_cache(VERIFIER, 1, [full, spec])
    with pytest.raises(FailedPrecondition, match="a KV cache in 2 tables"):
        check_cache(VERIFIER, 2, [full, window])


def test_settings_of_the_embedded_engine_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="VERIFIER_QUANTISATION"):
        open_executor(quantisation="int8")
