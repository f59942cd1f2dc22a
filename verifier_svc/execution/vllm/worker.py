"""vLLM's worker with our sampling: the class that `worker_cls` names. Runs in the worker processes alone."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from slipstream.engine.vllm import cpu_kernels
from verifier_svc.execution.vllm.messages import Graphs, SampledStep, StepMasks, WorkerSettings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker  # first: it gives torch what CPUs lack
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker
from slipstream.engine.vllm.device_runner import take_place
from slipstream.engine.vllm.options import kv_bytes
from verifier_svc.execution.vllm.runner import StepRunner

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends, however that ends. vLLM's own watch of its parent starts
    only when the model is loaded."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before
        os._exit(1)


def end_apart(why: str) -> None:
    """Ends this process, and so the verifier: the others may wait for this one in the midst of a step."""
    print(f"verifier: {why}", file=sys.stderr, flush=True)
    os._exit(os.EX_SOFTWARE)


class StepWorker(BaseWorker):  # type: ignore[misc]
    """Runs the steps of a `verifier_svc.execution.vllm.executor.VLLMExecutor`."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        end_with_parent()
        if current_platform.is_cpu():
            cpu_kernels.register()
        settings: WorkerSettings = vllm_config.additional_config
        self._failure_file, self._kv_tokens = Path(settings.failures), settings.kv_tokens
        with self._explaining():
            super().__init__(vllm_config, *args, **options)

    def init_device(self) -> None:
        self._unfinished = 0
        """Number of the step that began here and has not ended well; 0: none."""
        take_place(StepRunner)
        with self._explaining():
            super().init_device()

    def load_model(self, *args: Any, **options: Any) -> None:
        with self._explaining():
            super().load_model(*args, **options)
            self.model_runner.step_sampler.warm_up(self.model_config.dtype)

    def determine_available_memory(self) -> int:
        """Bytes for KV: those of the tokens that the verifier asks for, else what vLLM would take."""
        if self._kv_tokens:
            layers = list(self.get_kv_cache_spec().values())
            self.cache_config.kv_cache_memory_bytes = kv_bytes(layers, self._kv_tokens)
        with self._explaining():
            return int(super().determine_available_memory())

    def graphs(self) -> Graphs:
        graphs: Graphs = self.model_runner.graphs
        return graphs

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._unfinished and scheduler_output.succeeded == self._unfinished:
            # Only one worker's answer is read. What this one has of the sequences is not what that one decided.
            end_apart(f"worker {self.rank} failed in a step that other workers finished")
        self._unfinished = getattr(scheduler_output, "number", 0)  # vLLM's own steps, to warm up, have none
        self.model_runner.drop_unfinished()
        return super().execute_model(scheduler_output)

    def sample_tokens(self, masks: StepMasks | None) -> SampledStep:
        sampled: SampledStep = super().sample_tokens(masks)
        self._unfinished = 0
        return sampled

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """vLLM reports to its parent that a worker failed, without the reason."""
        try:
            yield
        except Exception as error:
            self._failure_file.write_text(f"{type(error).__name__}: {error}")
            raise
