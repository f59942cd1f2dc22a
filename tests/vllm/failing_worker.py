"""A worker whose sampler can be made to fail in one process of several: by masks of no rows, which no step has."""

from __future__ import annotations

from verifier_svc.execution.vllm.messages import SampledStep, StepMasks
from verifier_svc.execution.vllm.worker import StepWorker


class FailingWorker(StepWorker):
    def sample_tokens(self, masks: StepMasks | None) -> SampledStep:
        if masks is not None and not len(masks.bits):
            if self.rank == 1:
                raise RuntimeError("no memory here")
            masks = None
        return super().sample_tokens(masks)
