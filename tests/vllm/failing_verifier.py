"""`python -m tests.vllm.failing_verifier`: a verifier on vLLM of which one step in FAULT_EVERY fails in the worker's
sampler, and every step between two SIGUSR1."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np

FAULT_EVERY = 100


def main() -> None:
    from verifier_svc.__main__ import main as verify
    from verifier_svc.execution.vllm.executor import VLLMExecutor
    from verifier_svc.execution.vllm.messages import StepMasks

    right, steps, broken = VLLMExecutor._masks, 0, False

    def toggle(*_: Any) -> None:
        nonlocal broken
        broken = not broken

    def masks(self: VLLMExecutor, *step: Any) -> Any:
        nonlocal steps
        steps += 1
        if broken or steps % FAULT_EVERY == 0:  # for a request that the worker never heard of
            return StepMasks(["nobody"], *np.zeros((2, 1), np.int64), np.zeros((1, 512), np.uint8))
        return right(self, *step)

    signal.signal(signal.SIGUSR1, toggle)
    VLLMExecutor._masks = masks  # type: ignore[method-assign]
    verify()


if __name__ == "__main__":  # not in the workers, which read this file too
    main()
