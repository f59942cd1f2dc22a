"""vLLM's engine arguments from the verifier's settings: what the executor relies on is fixed, the rest free."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.model_info import ModelInfo
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.tokenizer.vocabulary import is_local, source_and_revision
from verifier_svc.config import KV_TOKENS, VerifierConfig
from verifier_svc.execution.executor import ExecutorLimits
from verifier_svc.execution.vllm.messages import WorkerSettings
from verifier_svc.execution.vllm.node_link import Nodes

SUPPORTED = "0.32"
"""The minor version of vLLM whose internals `tests/vllm/test_contract.py` checks."""
MAX_SEQUENCES = 256
"""Sequences of one step, unless the arguments set it: vLLM reserves memory for each."""
FIXED = {
    "--model": "it is VERIFIER_MODEL",
    "--revision": "it stands after the @ of VERIFIER_MODEL",
    "--tokenizer-revision": "it stands after the @ of VERIFIER_MODEL",
    "--dtype": "it is VERIFIER_DTYPE",
    "--max-num-batched-tokens": "it is VERIFIER_STEP_TOKENS",
    "--speculative-config": "candidates come from Slipstream's drafters",
    "--worker-cls": "sampling is Slipstream's",
    "--scheduler-cls": "scheduling is Slipstream's",
    "--distributed-executor-backend": "workers are vLLM's own processes, on each node",
    "--additional-config": "it carries Slipstream's own settings",
    "--pipeline-parallel-size": "pipelines of steps are not supported; use --tensor-parallel-size",
    "-pp": "pipelines of steps are not supported; use --tensor-parallel-size",
    "-dp": "start one verifier for each replica",
    "--data-parallel-size": "start one verifier for each replica",
    "-dcp": "a block holds the tokens of one rank alone",
    "--decode-context-parallel-size": "a block holds the tokens of one rank alone",
    "--kv-transfer-config": "KV blocks are Slipstream's",
    "--enable-prefix-caching": "KV blocks are Slipstream's",
    "--no-disable-hybrid-kv-cache-manager": "a session has one table of KV blocks",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--load-format": "weights are safetensors",
    "--enable-lora": "adapters are not served; merge one into its checkpoint (peft's merge_and_unload)",
    "--async-scheduling": "scheduling is Slipstream's",
    "--config": "options stand in VERIFIER_VLLM_ARGS itself",
}
"""Options that VERIFIER_VLLM_ARGS may not hold, and why."""
UNKNOWN_BYTES = 1
"""Of KV for the tokens that are asked for, until the workers know the layers."""
OF_ONE_NODE = ("node_rank", "additional_config")
"""vLLM's engine arguments that differ between the nodes of a group."""
SHOWN = 400
"""Characters of vLLM's own sentence in ours."""


def prepare_vllm(config: VerifierConfig) -> None:
    """Makes vLLM ready to be used in this process. Raises InvalidArgument for settings, FailedPrecondition for a vLLM
    that is missing or another version."""
    check_settings(config)
    prepare_environment(config)
    try:
        import vllm
    except ImportError as error:
        raise FailedPrecondition(
            f"vLLM is not installed for this interpreter ({error}); run `make setup-vllm`, or set "
            "SLIPSTREAM_VLLM_PYTHON.",
            reason="VLLM_MISSING",
        ) from error
    check_version(vllm.__version__)


def prepare_environment(config: VerifierConfig) -> None:
    """Sets vLLM's variables before it is imported; what the operator set stays, where it can."""
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        OMP_NUM_THREADS=str(threads_for(config.threads)),
    )
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():  # in the workers alone: it is read when a process starts
        defaults["LD_PRELOAD"] = str(openmp)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def check_settings(config: VerifierConfig) -> list[str]:
    """The words of VERIFIER_VLLM_ARGS. Raises InvalidArgument for settings that vLLM does not have or may not get."""
    if config.quantisation:
        raise InvalidArgument("VERIFIER_QUANTISATION is for the embedded engine; give vLLM's in VERIFIER_VLLM_ARGS.")
    words = _words(config.vllm_args)
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option in FIXED:
            raise InvalidArgument(f"VERIFIER_VLLM_ARGS holds {option}, which cannot be set: {FIXED[option]}.")
    return words


def engine_args(config: VerifierConfig, model: ModelInfo, failures: Path) -> Any:
    """vLLM's EngineArgs. Workers write into `failures` why they could not start. Raises InvalidArgument."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise InvalidArgument(f"VERIFIER_VLLM_ARGS cannot be read: {message}.")

        def exit(self, status: int = 0, message: str | None = None) -> None:
            raise InvalidArgument("VERIFIER_VLLM_ARGS holds --help or another option that ends the program.")

    source, revision = source_and_revision(config.model)
    kv_tokens, step_tokens = kv_and_step_tokens(config)
    # On a GPU the memory that is left sets the longest sequence, too.
    longest = str(min(model.max_length, kv_tokens)) if kv_tokens else "auto"
    fixed = ["--model", source, "--max-model-len", longest]
    fixed += [] if is_local(config.model) else ["--revision", revision, "--tokenizer-revision", revision]
    fixed += ["--dtype", config.dtype]
    fixed += ["--max-num-batched-tokens", str(step_tokens)] if step_tokens else []
    fixed += ["--max-num-seqs", str(min(step_tokens or MAX_SEQUENCES, MAX_SEQUENCES))]
    fixed += ["--enforce-eager"] if current_platform.is_cpu() else []
    parser = EngineArgs.add_cli_args(Parser(allow_abbrev=False))  # FIXED has whole names
    parsed = EngineArgs.from_cli_args(parser.parse_args([*fixed, *check_settings(config)]))
    parsed.trust_remote_code = False
    parsed.load_format = "safetensors"
    parsed.worker_cls = "verifier_svc.execution.vllm.worker.StepWorker"
    parsed.distributed_executor_backend = "mp"
    parsed.additional_config = WorkerSettings(str(failures))
    parsed.disable_log_stats = True
    parsed.async_scheduling = False
    parsed.enable_prefix_caching = False  # ours is above
    # Layers with a window keep the KV of all tokens as the others do: it is shared and rolled back by any length.
    parsed.disable_hybrid_kv_cache_manager = True
    # A method that loads nothing: the worker has no speculator. What counts is the longest chain.
    parsed.speculative_config = {"method": "ngram", "num_speculative_tokens": max(1, config.most_draft_tokens)}
    return parsed


def engine_config(config: VerifierConfig, model: ModelInfo, failures: Path) -> tuple[Any, dict[str, str]]:
    """vLLM's VllmConfig, and the settings that all nodes of a group must share, by name.

    Raises InvalidArgument for options, FailedPrecondition for a model that is not served, else vLLM's own errors.
    """
    import vllm.config.vllm
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    args = engine_args(config, model, failures)
    shared = {"vllm": SUPPORTED, "kv_tokens": str(config.kv_tokens)} | {
        each.name: str(value)
        for each in fields(args)
        if each.name not in OF_ONE_NODE and isinstance(value := getattr(args, each.name), str | int | float)
    }
    if current_platform.is_cpu():
        vllm.config.vllm.HAS_TRITON = True  # V2 asks for it; `cpu_kernels` stand in for its kernels
    vllm_config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)  # whose defaults these are
    check_layers(vllm_config.model_config)
    cache, (kv_tokens, _) = vllm_config.cache_config, kv_and_step_tokens(config)
    if kv_tokens and cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        cache.kv_cache_memory_bytes = UNKNOWN_BYTES
        vllm_config.additional_config.kv_tokens = kv_tokens
    return vllm_config, shared


def kv_and_step_tokens(config: VerifierConfig) -> tuple[int, int]:
    """What the verifier asks for; 0 where vLLM decides: on a GPU, unless they are set."""
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
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    shown = " ".join(lines).partition(" [type=")[0][:SHOWN].rstrip(". ")  # what pydantic adds is of no use
    return FailedPrecondition(f"vLLM cannot serve this target: {shown}.", reason="VLLM_REFUSED")


def check_layers(model: Any) -> None:
    """`model`: vLLM's ModelConfig, which is there before a weight is. Raises FailedPrecondition for a model that keeps
    more of a text than rows of KV."""
    if model.is_hybrid or model.has_inner_state or model.is_attention_free:
        raise unsupported("recurrent layers, whose state cannot be rolled back")


def unsupported(what: str) -> FailedPrecondition:
    return FailedPrecondition(f"this target has {what}: it is not served.", reason="MODEL_UNSUPPORTED")


def check_version(version: str) -> None:
    """Raises FailedPrecondition for a vLLM whose internals were not checked."""
    if not version.startswith(f"{SUPPORTED}."):
        raise FailedPrecondition(
            f"vLLM {version} is installed, and this version of Slipstream needs {SUPPORTED}.", reason="VLLM_VERSION"
        )


def _words(given: str) -> list[str]:
    try:
        return shlex.split(given)
    except ValueError as error:
        raise InvalidArgument(f"VERIFIER_VLLM_ARGS cannot be read: {error}.") from error
