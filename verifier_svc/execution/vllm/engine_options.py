"""vLLM's engine arguments for a target, from the verifier's settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from slipstream.engine.model_info import ModelInfo
from slipstream.engine.vllm import options
from slipstream.engine.vllm.options import MAX_SEQUENCES, SUPPORTED, VLLMModel, VLLMRole
from slipstream.errors import FailedPrecondition
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm.messages import EXTRA
from verifier_svc.execution.vllm.node_link import Nodes

VERIFIER = VLLMRole("verifier", "target")
BLOCK_SIZE = 32
OF_ONE_NODE = ("node_rank", "additional_config")
"""vLLM's engine arguments that differ between the nodes of a group."""


def prepare_vllm(config: VerifierConfig) -> None:
    """Makes vLLM ready to be used in this process. Raises InvalidArgument for settings, FailedPrecondition for a vLLM
    that is missing or another version."""
    check_settings(config)
    options.prepare_vllm(config.threads)


def check_settings(config: VerifierConfig) -> list[str]:
    """The words of VERIFIER_VLLM_ARGS. Raises InvalidArgument for settings that vLLM does not have or may not get."""
    return options.checked_words(VERIFIER, config.vllm_args, config.quantisation)


def engine_args(config: VerifierConfig, model: ModelInfo, failures: Path) -> Any:
    """vLLM's EngineArgs. Workers write into `failures` why they could not start. Raises InvalidArgument."""
    longest, most = min(model.max_length, config.kv_tokens), min(config.step_tokens, MAX_SEQUENCES)
    target = VLLMModel(config.model, config.dtype, longest, config.step_tokens, most)
    parsed = options.engine_args(VERIFIER, target, ["--block-size", str(BLOCK_SIZE), *check_settings(config)])
    parsed.worker_cls = "verifier_svc.execution.vllm.worker.StepWorker"
    parsed.distributed_executor_backend = "mp"
    parsed.additional_config = {EXTRA: str(failures)}
    # A method that loads nothing: the worker has no speculator. What counts is the longest chain.
    parsed.speculative_config = {"method": "ngram", "num_speculative_tokens": max(1, config.max_draft_tokens)}
    return parsed


def engine_config(config: VerifierConfig, model: ModelInfo, failures: Path) -> tuple[Any, dict[str, str]]:
    """vLLM's VllmConfig, and the settings that all nodes of a group must share, by name.

    Raises InvalidArgument for options, FailedPrecondition for a model that is not served, else vLLM's own errors.
    """
    args = engine_args(config, model, failures)
    shared = {"vllm": SUPPORTED, "kv_tokens": str(config.kv_tokens)} | {
        each.name: str(value)
        for each in fields(args)
        if each.name not in OF_ONE_NODE and isinstance(value := getattr(args, each.name), str | int | float)
    }
    vllm_config = options.engine_config(args)
    if vllm_config.model_config.get_sliding_window() is not None:  # known before the weights are loaded
        raise unsupported("a sliding window")
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        cache.kv_cache_memory_bytes = kv_bytes(vllm_config, config.kv_tokens)
    return vllm_config, shared


def nodes_of(vllm_config: Any) -> Nodes:
    parallel = vllm_config.parallel_config
    return Nodes(parallel.nnodes, parallel.node_rank, parallel.master_addr, parallel.master_port)


def refusal(error: Exception, failures: Path) -> FailedPrecondition:
    """vLLM's own sentence, from the worker that failed if there is one."""
    if failures.exists():
        why = failures.read_text()
    elif "background process" in str(error):
        why = "a worker ended at its start without a word, as one does that the kernel kills for its memory"
    else:
        why = f"{type(error).__name__}: {error}"
    return options.refusal(VERIFIER, why)


def unsupported(what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"this target has {what}, and with vLLM only full attention is served. Use VERIFIER_ENGINE=embedded.",
        reason="MODEL_UNSUPPORTED",
    )


def kv_bytes(vllm_config: Any, tokens: int) -> int:
    """Bytes on each device of KV for so many tokens, and of vLLM's null block."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    heads = model.get_num_kv_heads(vllm_config.parallel_config)
    layers = model.get_num_layers(vllm_config.parallel_config)
    width = 1 if "fp8" in str(cache.cache_dtype) or "int8" in str(cache.cache_dtype) else model.dtype.itemsize
    blocks = -(-tokens // cache.block_size) + 1
    return int(2 * layers * heads * model.get_head_size() * width * cache.block_size * blocks)
