"""vLLM's engine arguments from a role's settings: what Slipstream relies on is fixed, the rest free."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.vllm.scheduling import NULL_BLOCKS
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.tokenizer.vocabulary import is_local, source_and_revision

SUPPORTED = "0.32"
"""The minor version of vLLM whose internals `tests/vllm/test_contract.py` checks."""
MAX_SEQUENCES = 256
"""Sequences of one step, unless the arguments set it: vLLM reserves memory for each."""
FIXED = {
    "--model": "it is {prefix}MODEL",
    "--revision": "it stands after the @ of {prefix}MODEL",
    "--tokenizer-revision": "it stands after the @ of {prefix}MODEL",
    "--dtype": "it is {prefix}DTYPE",
    "--max-num-batched-tokens": "it is {prefix}STEP_TOKENS",
    "--speculative-config": "candidates come from Slipstream's drafters",
    "--worker-cls": "sampling is Slipstream's",
    "--scheduler-cls": "scheduling is Slipstream's",
    "--distributed-executor-backend": "workers are vLLM's own processes, on each node",
    "--additional-config": "it carries Slipstream's own settings",
    "--pipeline-parallel-size": "pipelines of steps are not supported; use --tensor-parallel-size",
    "-pp": "pipelines of steps are not supported; use --tensor-parallel-size",
    "-dp": "start one {role} for each replica",
    "--data-parallel-size": "start one {role} for each replica",
    "-dcp": "a block holds the tokens of one rank alone",
    "--decode-context-parallel-size": "a block holds the tokens of one rank alone",
    "--kv-transfer-config": "KV blocks are Slipstream's",
    "--enable-prefix-caching": "KV blocks are Slipstream's",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--load-format": "weights are safetensors",
    "--enable-lora": "adapters are not served; merge one into its checkpoint (peft's merge_and_unload)",
    "--no-disable-hybrid-kv-cache-manager": "a session has one table of KV blocks",
    "--async-scheduling": "scheduling is Slipstream's",
    "--config": "options stand in {prefix}VLLM_ARGS itself",
}
"""Options that a role's VLLM_ARGS may not hold, and why."""
ROW_BY_TOKEN = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
"""vLLM's kinds of KV cache in which a row belongs to one token and depends on those before it alone. MLA's is one, too:
on vLLM's CPU build what reads its rows again gives other texts, and why is not known yet."""
UNKNOWN_BYTES = 1
"""Bytes of KV for the tokens that are asked for, until the workers know the layers."""
SHOWN = 400
"""Characters of vLLM's own sentence in ours."""


class VLLMRole(NamedTuple):
    """Whose model it is, for sentences."""

    role: str
    model: str
    fixed: Mapping[str, str] = FIXED

    @property
    def prefix(self) -> str:
        return f"{self.role.upper()}_"

    @property
    def variable(self) -> str:
        return f"{self.prefix}VLLM_ARGS"


class VLLMModel(NamedTuple):
    """A model and its bounds, as a role's settings have them."""

    name: str
    dtype: str
    max_length: int
    """Most tokens of a sequence; 0: as many as the memory that is left allows."""
    step_tokens: int
    """Most tokens of a step; 0: vLLM's default."""
    max_sequences: int
    """Most sequences of a step, unless the arguments set it."""


def prepare_vllm(threads: int) -> None:
    """Makes vLLM ready to be used in this process. Raises FailedPrecondition for a vLLM that is missing or another
    version."""
    prepare_environment(threads)
    try:
        import vllm
    except ImportError as error:
        raise FailedPrecondition(
            f"vLLM is not installed for this interpreter ({error}); run `make setup-vllm`, or set "
            "SLIPSTREAM_VLLM_PYTHON.",
            reason="VLLM_MISSING",
        ) from error
    check_version(vllm.__version__)


def prepare_environment(threads: int) -> None:
    """Sets vLLM's variables before it is imported; what the operator set stays, where it can."""
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        OMP_NUM_THREADS=str(threads_for(threads)),
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


def checked_words(of: VLLMRole, given: str, quantisation: str) -> list[str]:
    """The words of the role's VLLM_ARGS. Raises InvalidArgument for settings that vLLM does not have or may not get."""
    if quantisation:
        raise InvalidArgument(f"{of.prefix}QUANTISATION is for the embedded engine; give vLLM's in {of.variable}.")
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise InvalidArgument(f"{of.variable} cannot be read: {error}.") from error
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option in of.fixed:
            why = of.fixed[option].format(prefix=of.prefix, role=of.role)
            raise InvalidArgument(f"{of.variable} holds {option}, which cannot be set: {why}.")
    return words


def engine_args(of: VLLMRole, model: VLLMModel, words: Sequence[str]) -> Any:
    """vLLM's EngineArgs for the model, with the operator's words. Raises InvalidArgument."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise InvalidArgument(f"{of.variable} cannot be read: {message}.")

        def exit(self, status: int = 0, message: str | None = None) -> None:
            raise InvalidArgument(f"{of.variable} holds --help or another option that ends the program.")

    source, revision = source_and_revision(model.name)
    fixed = ["--model", source, "--max-model-len", str(model.max_length or "auto")]
    fixed += [] if is_local(model.name) else ["--revision", revision, "--tokenizer-revision", revision]
    fixed += ["--dtype", model.dtype]
    fixed += ["--max-num-batched-tokens", str(model.step_tokens)] if model.step_tokens else []
    fixed += ["--max-num-seqs", str(model.max_sequences)]
    fixed += ["--enforce-eager"] if current_platform.is_cpu() else []
    parser = EngineArgs.add_cli_args(Parser(allow_abbrev=False))  # FIXED has whole names
    parsed = EngineArgs.from_cli_args(parser.parse_args([*fixed, *words]))
    parsed.trust_remote_code = False
    parsed.load_format = "safetensors"
    parsed.disable_log_stats = True
    parsed.async_scheduling = False
    parsed.enable_prefix_caching = False  # ours is above
    # Layers with a window keep the KV of all tokens as the others do: it is shared and rolled back by any length.
    parsed.disable_hybrid_kv_cache_manager = True
    return parsed


def engine_config(args: Any) -> Any:
    """vLLM's VllmConfig of its EngineArgs. Raises vLLM's own errors."""
    import vllm.config.vllm
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    if current_platform.is_cpu():
        vllm.config.vllm.HAS_TRITON = True  # V2 asks for it; `cpu_kernels` stand in for its kernels
    return args.create_engine_config(UsageContext.OPENAI_API_SERVER)  # whose defaults these are


def ask_for_kv(cache: Any, tokens: int) -> bool:
    """Leaves the size of vLLM's KV cache to its workers, which know the layers (`kv_bytes`). False where the operator's
    arguments set it, and where no tokens are asked for."""
    if not tokens or cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
        return False
    cache.kv_cache_memory_bytes = UNKNOWN_BYTES
    return True


def kv_bytes(layers: Sequence[Any], tokens: int) -> int:
    """Bytes of KV for so many tokens. `layers`: vLLM's KVCacheSpec of each."""
    blocks = NULL_BLOCKS + -(-tokens // layers[0].block_size)
    return int(blocks * sum(each.page_size_bytes for each in layers))


def check_layers(of: VLLMRole, model: Any) -> None:
    """`model`: vLLM's ModelConfig, which is there before a weight is. Raises FailedPrecondition for a model that keeps
    more of a text than rows of KV."""
    if model.is_hybrid or model.has_inner_state or model.is_attention_free:
        raise unsupported(of, "recurrent layers, whose state cannot be rolled back")


def check_cache(of: VLLMRole, tables: int, layers: Iterable[Any]) -> None:
    """`layers`: vLLM's KVCacheSpec of each. Raises FailedPrecondition for a model whose KV is not one row for each
    token in the blocks of one table: only that can be shared and rolled back by any length."""
    others = {
        type(each).__name__
        for each in layers
        if type(each).__name__ not in ROW_BY_TOKEN or each.tokens_per_state != 1 or getattr(each, "non_causal", False)
    }
    if others or tables != 1:
        kinds = ", ".join(sorted(others)) or "each of its own"
        raise unsupported(of, f"a KV cache in {tables} tables of blocks ({kinds})")


def refusal(of: VLLMRole, why: str) -> FailedPrecondition:
    """vLLM's own sentence."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    shown = " ".join(lines).partition(" [type=")[0][:SHOWN].rstrip(". ")  # what pydantic adds is of no use
    return FailedPrecondition(f"vLLM cannot serve this {of.model}: {shown}.", reason="VLLM_REFUSED")


def unsupported(of: VLLMRole, what: str) -> FailedPrecondition:
    return FailedPrecondition(f"this {of.model} has {what}: it is not served.", reason="MODEL_UNSUPPORTED")


def check_version(version: str) -> None:
    """Raises FailedPrecondition for a vLLM whose internals were not checked."""
    if not version.startswith(f"{SUPPORTED}."):
        raise FailedPrecondition(
            f"vLLM {version} is installed, and this version of Slipstream needs {SUPPORTED}.", reason="VLLM_VERSION"
        )
