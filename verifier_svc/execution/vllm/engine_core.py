"""vLLM's engine core in the verifier's process, with its workers as processes of their own, here and on other nodes.

The core loads the model and allocates the KV cache; its scheduler is not used. Errors of workers come back as
sentences, and workers or nodes that are gone or hang as `EngineLost`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.engine.engine import EngineLost
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.vllm.options import check_cache
from slipstream.errors import FailedPrecondition, InvalidArgument, SlipstreamError
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm.engine_options import VERIFIER, engine_config, nodes_of, prepare_vllm, refusal
from verifier_svc.execution.vllm.messages import Graphs, SampledStep, SpeculatorSettings, StepMasks, WorkerSettings
from verifier_svc.execution.vllm.node_link import LeaderLink

FIRST_STEP_S = 300.0
"""Least seconds that the first step may take: kernels and communication are set up in it."""
STATUS_S = 5.0
"""Seconds that a process's status may come after its sentinel: a killed one closes its files first."""
STATUS_AGAIN_S = 0.01
KILL_AGAIN_S = 0.2


class EngineCore:
    """Owned by the model's thread, which must live as long as the workers: they end with it."""

    def __init__(self, config: VerifierConfig, model: ModelInfo) -> None:
        """Raises InvalidArgument for settings, FailedPrecondition for a model or a machine that vLLM cannot serve."""
        prepare_vllm(config)
        self._step_timeout_s = config.vllm_step_timeout_s
        self._timeout_s = max(FIRST_STEP_S, config.vllm_step_timeout_s)
        self._lost = ""
        """Why the workers are lost; empty while they are there."""
        self._link: LeaderLink | None = None
        """To the other nodes, where there are any."""
        self._others = set(multiprocessing.active_children())
        """Processes that are no workers of this core."""
        self._opened = threading.Event()
        self._on_lost: Callable[[], object] = lambda: None
        with tempfile.TemporaryDirectory(prefix="slipstream-vllm-") as folder:
            failures = Path(folder) / "failure"
            try:
                self._core = self._open(config, model, failures)
            except SlipstreamError:
                self._hang_up()
                raise
            except Exception as error:
                self._hang_up()
                if self._lost:  # of the other node's end, not of what it did to ours
                    raise FailedPrecondition(f"{self._lost}.", reason="NODE_LOST") from error
                raise refusal(error, failures) from error
            finally:
                self._opened.set()
        self._executor, self._cache = self._core.model_executor, self._core.scheduler.kv_cache_config
        threading.Thread(target=self._watch, name="vllm-worker-watch", daemon=True).start()
        try:
            model_config = self._core.vllm_config.model_config
            self.dtype = str(model_config.dtype).removeprefix("torch.")
            self.precision = "-".join(filter(None, (model_config.quantization, self.dtype)))
            """The type, behind the quantiser if there is one."""
            check_cache(VERIFIER, len(self._cache.kv_cache_groups), self._executor.get_kv_cache_specs()[0].values())
            self.graphs: Graphs = self._call("graphs").result()
        except SlipstreamError:
            self.close()
            raise

    @property
    def block_size(self) -> int:
        """Tokens of a block, as vLLM chose it for the model's attention."""
        return int(self._cache.kv_cache_groups[0].kv_cache_spec.block_size)

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache, vLLM's null block included."""
        return int(self._cache.num_blocks)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self._core.vllm_config.model_config.max_model_len)

    @property
    def max_sequences(self) -> int:
        """Most sequences of one step."""
        return int(self._core.vllm_config.scheduler_config.max_num_seqs)

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step."""
        return int(self._core.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def speculator(self) -> SpeculatorSettings | None:
        settings: WorkerSettings = self._core.vllm_config.additional_config
        return settings.speculator

    @property
    def lost(self) -> str:
        """Why there are no workers any more; empty while they are there."""
        return self._lost

    @property
    def worker_pids(self) -> list[int]:
        return [worker.proc.pid for worker in self._executor.workers]

    def call_when_lost(self, call: Callable[[], object]) -> None:
        """Calls once, on any thread, when a worker or a node is gone, or now if one is."""
        self._on_lost = call
        if self._lost:
            call()

    def run(self, output: Any, masks: Callable[[], StepMasks | None]) -> SampledStep:
        """Runs one step: the model, meanwhile `masks`, then the sampling. Raises EngineLost; RuntimeError for a step
        that failed in a worker that lives."""
        if self._lost:
            raise EngineLost(self._lost, reason="WORKER_LOST")
        try:
            result = self._run(output, masks)
        except TimeoutError as error:
            self._lose(f"a vLLM worker did not answer for {self._timeout_s:g} s")
            raise EngineLost(self._lost, reason="WORKER_LOST") from error
        except Exception as error:
            if self._lost or self._executor.is_failed:
                self._lose(self._lost or end_of(self._executor.workers))
                raise EngineLost(self._lost, reason="WORKER_LOST") from error
            raise
        self._timeout_s = self._step_timeout_s
        return result

    def close(self) -> None:
        """Ends the workers, and the other nodes."""
        self._lost = self._lost or "vLLM is closed"
        self._hang_up()
        self._core.shutdown()

    def _open(self, config: VerifierConfig, model: ModelInfo, failures: Path) -> Any:
        """vLLM's core, once all nodes are there."""
        vllm_config, shared = engine_config(config, model, failures)
        nodes = nodes_of(vllm_config)
        if nodes.rank:
            raise InvalidArgument(
                f"VERIFIER_VLLM_ARGS holds --node-rank {nodes.rank}: run `python -m verifier_svc.vllm_follower` there."
            )
        if nodes.size > 1:
            self._link = LeaderLink(nodes, shared, self._lose_workers)
            self._link.wait()
        from vllm.v1.engine.core import EngineCore as Core
        from vllm.v1.executor.abstract import Executor

        return Core(vllm_config, Executor.get_class(vllm_config), log_stats=False)

    def _run(self, output: Any, masks: Callable[[], StepMasks | None]) -> SampledStep:
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
        decided: SampledStep = sampled.result()
        return decided

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._executor.collective_rpc(
            method,
            args=arguments,
            unique_reply_rank=self._executor.output_rank,
            non_block=True,
            timeout=self._timeout_s,
        )

    def _watch(self) -> None:
        self._lose_workers(wait_for_end(self._executor.workers))

    def _lose_workers(self, why: str) -> None:
        if self._lost:
            return
        self._lose(why)
        self._on_lost()
        while not self._opened.wait(KILL_AGAIN_S):  # workers that start now wait for that node
            self._kill_workers()

    def _lose(self, why: str) -> None:
        """Ends the workers that are left, here and elsewhere, so that no wait for them lasts."""
        self._lost = self._lost or why
        self._kill_workers()
        self._hang_up()

    def _kill_workers(self) -> None:
        for worker in set(multiprocessing.active_children()) - self._others:
            with contextlib.suppress(ValueError, OSError):
                worker.kill()

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()


def wait_for_end(workers: Sequence[Any]) -> str:
    """Waits for the first of vLLM's worker handles whose process ends; returns how it ended."""
    multiprocessing.connection.wait([worker.proc.sentinel for worker in workers])
    return end_of(workers)


def end_of(workers: Sequence[Any]) -> str:
    """Describes the end of the first of these processes that has a status. Waits up to STATUS_S for one: a process
    closes its files before it has a status, and of two threads that read it at once one reads None."""
    deadline = time.monotonic() + STATUS_S
    while True:
        for worker in workers:
            if (code := worker.proc.exitcode) is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                return f"a vLLM worker {how}"
        if time.monotonic() >= deadline:
            return "a vLLM worker ended"
        time.sleep(STATUS_AGAIN_S)
