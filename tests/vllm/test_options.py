"""The arguments that vLLM is given where the operator sets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.models.checkpoint import describe_checkpoint
from tests.vllm.decoding import TARGET
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm.engine_options import engine_args, engine_config


def arguments(**settings: Any) -> Any:
    config = VerifierConfig(**({"model": TARGET, "engine": "vllm"} | settings))
    return engine_args(config, describe_checkpoint(TARGET), Path("failures"))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_vllm_decides_memory_steps_and_graphs() -> None:
    given = arguments()
    assert given.kv_cache_memory_bytes is None and given.num_gpu_blocks_override is None
    assert (given.max_model_len, given.max_num_batched_tokens, given.max_num_seqs) == (-1, None, 256)
    assert given.compilation_config.cudagraph_capture_sizes is None and not given.enforce_eager
    assert given.speculative_config["num_speculative_tokens"] == 8
    assert given.block_size is None and given.disable_hybrid_kv_cache_manager


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_settings_and_options_of_vllm_hold() -> None:
    given = arguments(kv_tokens=300, step_tokens=128, max_draft_tokens=16)
    assert (given.max_model_len, given.max_num_batched_tokens, given.max_num_seqs) == (300, 128, 128)
    assert given.speculative_config["num_speculative_tokens"] == 16
    given = arguments(vllm_args="--max-model-len 200 --block-size 64 --max-num-seqs 512 --kv-cache-memory-bytes 4G")
    assert (given.max_model_len, given.block_size, given.max_num_seqs) == (200, 64, 512)
    assert given.kv_cache_memory_bytes == 4 << 30


def test_the_compilation_cache_is_valid_at_the_next_start() -> None:
    config = VerifierConfig(model=TARGET, engine="vllm")
    starts = (engine_config(config, describe_checkpoint(TARGET), Path(name))[0] for name in ("one", "two"))
    assert len({each.compute_hash() for each in starts}) == 1


def test_on_a_cpu_the_verifier_asks_for_no_more_than_the_embedded_engine_takes() -> None:
    given = arguments()
    longest = describe_checkpoint(TARGET).max_length
    assert (given.max_model_len, given.max_num_batched_tokens, given.enforce_eager) == (longest, 512, True)
