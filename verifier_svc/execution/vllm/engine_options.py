"""vLLM's engine arguments for a target, from the verifier's settings."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from slipstream.engine.model_info import ModelInfo
from slipstream.engine.vllm import options
from slipstream.engine.vllm.options import FIXED, MAX_SEQUENCES, SUPPORTED, VLLMModel, VLLMRole
from slipstream.errors import FailedPrecondition
from verifier_svc.config import KV_TOKENS, VerifierConfig
from verifier_svc.execution.executor import ExecutorLimits
from verifier_svc.execution.vllm.messages import WorkerSettings
from verifier_svc.execution.vllm.node_link import Nodes
from verifier_svc.execution.vllm.speculator_config import VARIABLE, settings_of, speculator_of

VERIFIER = VLLMRole("verifier", "target", FIXED | {"--speculative-config": f"it is {VARIABLE}"})
OF_ONE_NODE = ("node_rank", "additional_config")
"""vLLM's engine arguments that differ between the nodes of a group."""


def prepare_vllm(config: VerifierConfig) -> None:
    """Makes vLLM ready to be used in this process. Raises InvalidArgument for settings, FailedPrecondition for a vLLM
    that is missing or another version."""
    check_settings(config)
    options.prepare_vllm(config.threads)


def check_settings(config: VerifierConfig) -> list[str]:
    """The words of VERIFIER_VLLM_ARGS. Raises InvalidArgument for settings that vLLM does not have or may not get."""
    speculator_of(config)
    return options.checked_words(VERIFIER, config.vllm_args, config.quantisation)


def engine_args(config: VerifierConfig, model: ModelInfo, failures: Path) -> Any:
    """vLLM's EngineArgs. Workers write into `failures` why they could not start. Raises InvalidArgument."""
    kv_tokens, step_tokens = kv_and_step_tokens(config)
    # On a GPU the memory that is left sets the longest sequence, too.
    longest = min(model.max_length, kv_tokens) if kv_tokens else 0
    most = min(step_tokens or MAX_SEQUENCES, MAX_SEQUENCES)
    target = VLLMModel(config.model, config.dtype, longest, step_tokens, most)
    parsed = options.engine_args(VERIFIER, target, check_settings(config))
    parsed.worker_cls = "verifier_svc.execution.vllm.worker.StepWorker"
    parsed.distributed_executor_backend = "mp"
    parsed.additional_config = WorkerSettings(str(failures))
    # Without a speculator a method that loads nothing. What counts is the longest chain.
    none = {"method": "ngram", "num_speculative_tokens": max(1, config.most_draft_tokens)}
    parsed.speculative_config = speculator_of(config) or none
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
    options.check_layers(VERIFIER, vllm_config.model_config)
    kv_tokens, _ = kv_and_step_tokens(config)
    if options.ask_for_kv(vllm_config.cache_config, kv_tokens):
        vllm_config.additional_config.kv_tokens = kv_tokens
    speculation, given = vllm_config.speculative_config, speculator_of(config)
    vllm_config.additional_config.speculator = settings_of(speculation, given)
    # vLLM has one number for what is drafted and what is verified; chains come from other sources, too.
    speculation.num_speculative_tokens = max(1, config.most_draft_tokens)
    shared["speculator"] = json.dumps(given, sort_keys=True)
    return vllm_config, shared


def kv_and_step_tokens(config: VerifierConfig) -> tuple[int, int]:
    """Tokens that the verifier asks for; 0 where vLLM decides: on a GPU, unless they are set."""
    from vllm.platforms import current_platform

    kv_tokens, step_tokens = (KV_TOKENS, ExecutorLimits().step_tokens) if current_platform.is_cpu() else (0, 0)
    return config.kv_tokens or kv_tokens, config.step_tokens or step_tokens


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
