"""vLLM's runner for the device of this process, and a subclass in its place."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu import model_runner as device_runner
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as BaseRunner
else:
    from vllm.v1.worker.gpu import model_runner as device_runner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as BaseRunner

__all__ = ["BaseRunner", "take_place"]


def take_place(runner: type[Any]) -> None:
    """vLLM's worker makes one of these from now on."""
    setattr(device_runner, BaseRunner.__name__, runner)
