"""Captured graphs: a padded step's kernels are launched by the device's driver, not one by one by Python.

A pass of a small or middling model on a GPU is bound by the host, which takes some microseconds for each of hundreds
of kernels. A graph is captured once for each bucket, and each step copies its inputs to the bucket's addresses and
replays it. Nothing waits for the device: the logits are a promise until somebody reads a number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.engine.cuda_graphs.flex import FlexKernel, Kernel, unfit, width
from slipstream.engine.cuda_graphs.inputs import Bucket, Buckets, Inputs, Pool
from slipstream.engine.cuda_graphs.paged import PagedPlan
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.store import KVStore
from slipstream.engine.models.checkpoint import Checkpoint
from slipstream.engine.models.forward import Forward
from slipstream.engine.segment import Segment

log = logging.getLogger(__name__)


class Recorder(Protocol):
    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Runs the body once or more, and returns what repeats its operations on the tensors they worked on, without
        running it. Raises RuntimeError if the body does something that cannot be repeated so, such as to wait for
        the device."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they never run at the same time, and their result is copied out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        current, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):  # libraries allocate for each stream, which a capture must not
            body()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: a drafter's, in tests.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            body()
        replay: Callable[[], None] = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class Acceleration:
    """How an engine runs padded steps."""

    kernel: Kernel
    recorder: Recorder | None
    """None: the padded steps are run, not captured."""
    buckets: Buckets

    def build(self, checkpoint: Checkpoint, pool: BlockPool) -> tuple[KVStore, GraphedSteps]:
        """KV for the blocks of the pool, and the steps over it."""
        most, length = self.buckets.most_tokens, checkpoint.info.max_length
        longest = min(pool.blocks_for(length + most), pool.total + 1)
        padded = Pool(pool.total, pool.block_size, longest, length)
        store = KVStore(checkpoint.layers, padded.rows, masked=True)
        inputs = Inputs(most, self.buckets.width, padded, checkpoint.device)
        return store, GraphedSteps(self, checkpoint.forward, store, inputs)


def accelerate(checkpoint: Checkpoint) -> Acceleration | None:
    """How a model on a GPU runs its padded steps; None, with a warning, if its layers do not go through the kernel."""
    why = unfit(checkpoint.layers)
    if why is not None:
        log.warning("%s takes the ordinary path: %s", checkpoint.info.name, why)
        return None
    return Acceleration(FlexKernel(), CudaRecorder(checkpoint.device), Buckets(width(checkpoint.layers)))


class GraphedSteps:
    """The padded steps of one engine, on its thread."""

    def __init__(self, acceleration: Acceleration, forward: Forward, store: KVStore, inputs: Inputs) -> None:
        self._kernel, self._recorder = acceleration.kernel, acceleration.recorder
        self._buckets = acceleration.buckets
        self._forward = forward
        self._store = store
        self._inputs = inputs
        self._runs: dict[Bucket, Callable[[], None]] = {}
        self._useless = False
        self._logits: Tensor | None = None
        """fp32 [most, vocabulary]: where all graphs leave theirs."""

    def run(self, segments: list[Segment]) -> Tensor | None:
        """Logits fp32 [rows, vocabulary] of a step; None if it is too large to be padded, or nothing can be here."""
        bucket = self._buckets.find([segment.tokens for segment in segments])
        run = self._runs.get(bucket) or self._capture(bucket) if bucket is not None else None
        if run is None:
            return None
        wanted = self._inputs.fill(segments)
        run()
        assert self._logits is not None
        return self._logits[:wanted].clone()  # the next step writes there

    def capture(self) -> None:
        """Captures every bucket now, so that no step waits for it later."""
        begun = time.perf_counter()
        for bucket in self._buckets:
            if bucket not in self._runs:
                self._capture(bucket)
        log.info("%d sizes of steps prepared in %.1f s", len(self._runs), time.perf_counter() - begun)

    def _capture(self, bucket: Bucket) -> Callable[[], None] | None:
        if self._useless:
            return None
        self._inputs.fill([])  # it is run here already, and must write to no session's rows

        def body() -> None:
            logits = self._forward(PagedPlan(self._inputs, bucket, self._store, self._kernel)).logits
            if self._logits is None:
                self._logits = torch.empty(
                    self._inputs.most, logits.shape[1], dtype=torch.float32, device=logits.device
                )
            self._logits[: bucket.tokens].copy_(logits)

        try:
            body()  # the kernel is compiled now
        except RuntimeError as error:
            log.warning("steps are not padded: the attention kernel cannot be compiled or run here: %s", error)
            self._useless = True
            return None
        run = self._runs[bucket] = self._recorded(body)
        return run

    def _recorded(self, body: Callable[[], None]) -> Callable[[], None]:
        if self._recorder is None:
            return body
        try:
            return self._recorder.capture(body)
        except RuntimeError as error:
            # Some families look at numbers on the host: experts that are looped over, rotary tables that grow.
            log.warning("this model's steps cannot be captured and are launched kernel by kernel: %s", error)
            self._recorder = None
            return body
