"""Times on a device, and work captured as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Figures = dict[str, float | int | bool | str]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a part computes and how much of it."""

    device: torch.device
    small: bool = False
    """Sizes for a test on a CPU."""

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 30, warm: int = 3) -> float:
        """Median from the call to the end of the device's work."""
        found = []
        for _ in range(warm + repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found[warm:])

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same work as one graph. `run` reads and writes the same tensors each time; on a CPU it is itself."""
        if self.device.type != "cuda":
            return run
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # allocations and compilations of the first calls are no part of a graph
            for _ in range(3):
                run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def bandwidth(self) -> float:
        """Bytes a second that the device reads: a sum over memory that no cache holds."""
        memory = torch.ones((1 << 16 if self.small else 1 << 30) // 4, device=self.device)
        return memory.nbytes / self.seconds(lambda: memory.sum(), 10)
