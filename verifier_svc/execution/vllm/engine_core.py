"""vLLM's engine core in the verifier's process, with its workers as processes of their own.

The core loads the model and allocates the KV cache; its scheduler is not used. Errors of workers come back as
sentences, and workers that are gone or hang as `EngineLost`.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.engine.engine import EngineLost
from slipstream.engine.model_info import ModelInfo
from slipstream.errors import FailedPrecondition, SlipstreamError
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm.engine_options import (
    check_settings,
    check_version,
    engine_args,
    kv_bytes,
    prepare_environment,
)
from verifier_svc.execution.vllm.messages import Masks

FIRST_STEP_S = 300.0
"""Least seconds that the first step may take: kernels and communication are set up in it."""
SHOWN = 400
"""Characters of vLLM's own sentence in ours."""


class EngineCore:
    """Owned by the model's thread, which must live as long as the workers: they end with it."""

    def __init__(self, config: VerifierConfig, model: ModelInfo) -> None:
        """Raises InvalidArgument for settings, FailedPrecondition for a model or a machine that vLLM cannot serve."""
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
        self._step_timeout_s = config.vllm_step_timeout_s
        self._timeout_s = max(FIRST_STEP_S, config.vllm_step_timeout_s)
        with tempfile.TemporaryDirectory(prefix="slipstream-vllm-") as folder:
            failures = Path(folder) / "failure"
            try:
                self._core = _open_core(config, model, failures)
            except SlipstreamError:
                raise
            except Exception as error:
                raise _refusal(error, failures) from error
        self._executor = self._core.model_executor
        self._lost = ""
        """Why the workers are lost; empty while they are there."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called once, on another thread, when a worker is gone."""
        threading.Thread(target=self._watch, name="vllm-worker-watch", daemon=True).start()
        try:
            self.dtype = str(self._core.vllm_config.model_config.dtype).removeprefix("torch.")
            _check_cache(self._core.scheduler.kv_cache_config)
        except SlipstreamError:
            self.close()
            raise

    @property
    def block_size(self) -> int:
        return int(self._core.vllm_config.cache_config.block_size)

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache, vLLM's null block included."""
        return int(self._core.vllm_config.cache_config.num_gpu_blocks)

    @property
    def max_sequences(self) -> int:
        """Most sequences of one step."""
        return int(self._core.vllm_config.scheduler_config.max_num_seqs)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.proc.pid for worker in self._executor.workers]

    def run(self, output: Any, masks: Callable[[], Masks]) -> Any:
        """Runs one step: the model, meanwhile `masks`, then the sampling. Returns vLLM's output. Raises EngineLost;
        RuntimeError for a step that failed in a worker that lives."""
        if self._lost:
            raise EngineLost(self._lost, reason="WORKER_LOST")
        try:
            result = self._run(output, masks)
        except TimeoutError as error:
            self._lose(f"a vLLM worker did not answer for {self._timeout_s:g} s")
            raise EngineLost(self._lost, reason="WORKER_LOST") from error
        except Exception as error:
            if self._lost or self._executor.is_failed:
                self._lose("a vLLM worker ended")
                raise EngineLost(self._lost, reason="WORKER_LOST") from error
            raise
        self._timeout_s = self._step_timeout_s
        return result

    def close(self) -> None:
        """Ends the workers."""
        self._lost = self._lost or "vLLM is closed"
        self._core.shutdown()

    def _run(self, output: Any, masks: Callable[[], Masks]) -> Any:
        """Takes every answer that it asked for, also when one of them is an error."""
        computed = self._call("execute_model", output)
        try:
            allowed = masks()
        except BaseException:
            computed.result()
            raise
        sampled = self._call("sample_tokens", allowed)
        try:
            computed.result()
        except Exception:
            with contextlib.suppress(RuntimeError):
                sampled.result()
            raise
        return sampled.result()

    def _call(self, method: str, argument: Any) -> Any:
        return self._executor.collective_rpc(
            method,
            args=(argument,),
            unique_reply_rank=self._executor.output_rank,
            non_block=True,
            timeout=self._timeout_s,
        )

    def _watch(self) -> None:
        workers = [worker.proc for worker in self._executor.workers]
        multiprocessing.connection.wait([worker.sentinel for worker in workers])
        if not self._lost:
            self._lose("a vLLM worker ended")
            self.on_lost()

    def _lose(self, why: str) -> None:
        """Ends the workers that are left, so that no wait for them lasts."""
        self._lost = self._lost or why
        for worker in list(self._executor.workers):
            with contextlib.suppress(ValueError, OSError):
                worker.proc.kill()


def _open_core(config: VerifierConfig, model: ModelInfo, failures: Path) -> Any:
    from vllm.v1.engine.core import EngineCore as Core
    from vllm.v1.executor.abstract import Executor

    args = engine_args(config, model, failures)
    vllm_config = args.create_engine_config()
    if vllm_config.model_config.get_sliding_window() is not None:  # known before the weights are loaded
        raise _unsupported("a sliding window")
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
        cache.kv_cache_memory_bytes = kv_bytes(vllm_config, config.kv_tokens)
    return Core(vllm_config, Executor.get_class(vllm_config), log_stats=False)


def _refusal(error: Exception, failures: Path) -> FailedPrecondition:
    """vLLM's own sentence, from the worker that failed if there is one."""
    why = failures.read_text() if failures.exists() else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    shown = " ".join(lines).partition(" [type=")[0][:SHOWN].rstrip(". ")  # what pydantic adds is of no use
    return FailedPrecondition(f"vLLM cannot serve this target: {shown}.", reason="VLLM_REFUSED")


def _check_cache(kv_cache: Any) -> None:
    """Raises FailedPrecondition for a model whose KV is not that of one kind of full attention."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    kinds = sorted({type(spec).__name__ for spec in specs})
    if len(specs) != 1 or kinds != ["FullAttentionSpec"]:
        raise _unsupported(f"{len(specs)} kinds of KV cache ({', '.join(kinds)})")
    if specs[0].sliding_window is not None or specs[0].attention_chunk_size is not None:
        raise _unsupported("a window")


def _unsupported(what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"this target has {what}, and with vLLM only full attention is served. Use VERIFIER_ENGINE=embedded.",
        reason="MODEL_UNSUPPORTED",
    )
