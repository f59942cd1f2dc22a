"""What vLLM or its workers refuse reaches the operator as one sentence."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.errors import FailedPrecondition, InvalidArgument
from tests.checkpoints import save_checkpoint
from tests.vllm.conftest import open_executor
from tests.vllm.system import LIMIT_S, until, workers
from verifier_svc.execution.vllm.engine_core import _check_cache


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--no-such-option", "VERIFIER_VLLM_ARGS cannot be read: unrecognized arguments: --no-such-option"),
        ("--tensor-parallel-size many", "VERIFIER_VLLM_ARGS cannot be read: .*invalid int value"),
        ("--speculative-config {}", "--speculative-config, which cannot be set: candidates come from"),
        ("--trust-remote-code", "--trust-remote-code, which cannot be set: code of a checkpoint is never run"),
        ("--trust-remote", "unrecognized arguments: --trust-remote"),
        ("--decode-context-parallel-size=2", "-size, which cannot be set: a block holds the tokens of one rank"),
        ("--config options.yaml", "--config, which cannot be set: options stand in VERIFIER_VLLM_ARGS itself"),
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


def test_a_worker_that_is_killed_while_it_starts_is_told() -> None:
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


def test_a_target_with_windows_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint("mistral", tmp_path)
    with pytest.raises(FailedPrecondition, match=r"a sliding window, .* Use VERIFIER_ENGINE=embedded"):
        open_executor(model=str(folder), kv_tokens=1024)


def test_a_kv_cache_that_is_not_one_of_full_attention_is_refused() -> None:
    FullAttentionSpec = type("FullAttentionSpec", (), {"sliding_window": None, "attention_chunk_size": None})
    MLAAttentionSpec = type("MLAAttentionSpec", (FullAttentionSpec,), {})

    def cache(*specs: object) -> SimpleNamespace:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])

    windowed = FullAttentionSpec()
    windowed.sliding_window = 64
    _check_cache(cache(FullAttentionSpec()))
    for found in (cache(MLAAttentionSpec()), cache(windowed), cache(), cache(FullAttentionSpec(), FullAttentionSpec())):
        with pytest.raises(FailedPrecondition, match="Use VERIFIER_ENGINE=embedded"):
            _check_cache(found)


def test_settings_of_the_embedded_engine_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="VERIFIER_QUANTISATION"):
        open_executor(quantisation="int8")
