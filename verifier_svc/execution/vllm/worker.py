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

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from verifier_svc.execution.vllm.messages import EXTRA, StepMasks
from verifier_svc.execution.vllm.step_sampler import StepSampler

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

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


class NoProposer:
    """vLLM builds its verification only for a speculative configuration; the candidates come from the verifier."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, model: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled: list[list[int]], *args: Any, **options: Any) -> list[list[int]]:
        return [[] for _ in sampled]


class PlainSampler(Sampler):  # type: ignore[misc]
    """Rows without candidates."""

    def __init__(self, like: Any, step: StepSampler) -> None:
        super().__init__(like.logprobs_mode)
        self._step = step

    def forward(self, logits: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not self._step.active:
            return super().forward(logits, *args, **options)
        counts = np.zeros(len(logits), np.int64)
        drafts = torch.empty(0, dtype=torch.int64, device=logits.device)
        return SamplerOutput(self._step.decide(logits, counts, drafts), None)


class CandidateSampler(RejectionSampler):  # type: ignore[misc]
    """Rows with candidates, among them requests that have none."""

    def __init__(self, sampler: Any, config: Any, device: torch.device, step: StepSampler) -> None:
        super().__init__(sampler, config, device)
        self._step = step

    def forward(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        if not self._step.active:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        counts = np.array(metadata.num_draft_tokens, np.int64)
        return SamplerOutput(self._step.decide(logits, counts, metadata.draft_token_ids), None)


class StepWorker(BaseWorker):  # type: ignore[misc]
    """Runs the steps of a `verifier_svc.execution.vllm.executor.VLLMExecutor`."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        end_with_parent()
        self._failure_file = Path(vllm_config.additional_config[EXTRA])
        with self._explaining():
            super().__init__(vllm_config, *args, **options)

    def init_device(self) -> None:
        with self._explaining():
            super().init_device()
        runner = self.model_runner
        self._unfinished = 0
        """Number of the step that began here and has not ended well; 0: none."""
        self._step = StepSampler(runner, self.model_config.get_vocab_size(), runner.device)
        runner.sampler = PlainSampler(runner.sampler, self._step)
        runner.rejection_sampler = CandidateSampler(
            runner.sampler, runner.speculative_config, runner.device, self._step
        )

    def load_model(self, *args: Any, **options: Any) -> None:
        with self._explaining():
            super().load_model(*args, **options)
            self._step.warm_up(self.model_config.dtype)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._unfinished and scheduler_output.succeeded == self._unfinished:
            # Only one worker's answer is read. What this one has of the sequences is not what that one decided.
            end_apart(f"worker {self.rank} failed in a step that other workers finished")
        self._unfinished = scheduler_output.number
        self.model_runner.execute_model_state = None  # of a step that failed before it was sampled
        new, finished = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
        self._step.begin(new, finished, getattr(scheduler_output, "proposals", None))
        return super().execute_model(scheduler_output)

    @torch.inference_mode()
    def sample_tokens(self, masks: StepMasks | None) -> Any:
        """vLLM's output of the step, with a `SampledStep` in its attribute `sampled`."""
        if self.model_runner.execute_model_state is None:
            raise RuntimeError("the step did not run")
        self._step.start_sampling(masks)
        try:
            output = super().sample_tokens(None)
        finally:
            sampled = self._step.take_sampled()
        output.sampled = sampled
        self._unfinished = 0
        return output

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """vLLM tells its parent that a worker failed, not why."""
        try:
            yield
        except Exception as error:
            self._failure_file.write_text(f"{type(error).__name__}: {error}")
            raise
