"""Opens the target: in this process, on vLLM's workers, or on several ranks, whose leader schedules."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.emulated.model import EMULATED
from slipstream.engine.engine import Engine, EngineLost
from slipstream.engine.factory import open_engine
from slipstream.engine.model_thread import ModelThread
from slipstream.engine.models.quantisation import check_target_quantisation, silence_quantiser_logs
from slipstream.engine.models.spread import Spread
from slipstream.engine.tensor_parallel.group import Group, Rank, leading
from slipstream.errors import InvalidArgument
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import StepExecutor

if TYPE_CHECKING:
    from slipstream.engine.models.checkpoint import Checkpoint
    from verifier_svc.execution.vllm.executor import VLLMExecutor


def own_rank() -> Rank:
    """This process's place among the ranks that `torchrun` started. Raises InvalidArgument."""
    return Rank.from_environment()


@asynccontextmanager
async def running_executor(
    opening: Callable[[VerifierConfig], Engine], config: VerifierConfig, thread: ModelThread
) -> AsyncIterator[StepExecutor]:
    """The configured executor, opened on `thread`; an embedded one runs the engine that `opening` returns. The other
    ranks, if there are any, and vLLM's workers end with the block. Lost ones end it with EngineLost."""
    if config.engine == "vllm":
        async with _running_vllm(config, thread) as executor:
            yield executor
        return
    engine = await thread.run(opening, config)
    async with leading(engine, thread, config.group_timeout_s):
        yield EmbeddedExecutor(engine)


@asynccontextmanager
async def _running_vllm(config: VerifierConfig, thread: ModelThread) -> AsyncIterator[StepExecutor]:
    executor = await thread.run(_open_vllm, config)
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    executor.core.on_lost = partial(loop.call_soon_threadsafe, lost.set)
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_raise_when(lost))
            try:
                yield executor
            finally:
                watching.cancel()
    finally:
        await thread.run(executor.close)


async def _raise_when(lost: asyncio.Event) -> None:
    await lost.wait()
    raise EngineLost("a vLLM worker ended", reason="WORKER_LOST")


def _open_vllm(config: VerifierConfig) -> VLLMExecutor:
    """Imports vLLM, which not every interpreter has. Raises what `VLLMExecutor` raises."""
    from slipstream.engine.models.checkpoint import describe_checkpoint
    from verifier_svc.execution.vllm.executor import VLLMExecutor

    if config.model.startswith(EMULATED):
        raise InvalidArgument(f"{config.model} has no weights; use VERIFIER_ENGINE=embedded.")
    return VLLMExecutor(config, describe_checkpoint(config.model))


def open_target(config: VerifierConfig) -> Engine:
    """Opens the configured target. Under `torchrun` the leader calls it; the other ranks call `follow`."""
    place, quantisation = own_rank(), check_target_quantisation(config.quantisation)
    if place.size == 1:
        return open_engine(
            config.model, config.dtype, config.kv_tokens, quantisation, config.lean, _spread(config, place)
        )
    group, checkpoint = _join(config, place)
    from slipstream.engine.tensor_parallel.parallel import LeadingEngine

    return LeadingEngine(checkpoint, config.kv_tokens, group)


def follow(config: VerifierConfig, place: Rank) -> None:
    """Runs a rank that does not lead until its leader ends it. Raises GroupLost when the leader is gone. SIGTERM and
    SIGINT are ignored, because the leader answers them for all ranks."""
    torch.set_num_threads(threads_for(config.threads))
    group, checkpoint = _join(config, place)
    from slipstream.engine.tensor_parallel.parallel import FollowingEngine

    engine = FollowingEngine(checkpoint, config.kv_tokens, group)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine.follow()


def _join(config: VerifierConfig, place: Rank) -> tuple[Group, Checkpoint]:
    if config.model.startswith(EMULATED):
        raise InvalidArgument(f"{config.model} has no weights to cut; start it without torchrun.")
    silence_quantiser_logs()  # before the imports below, which take seconds
    from slipstream.engine.models.checkpoint import load_checkpoint
    from slipstream.engine.tensor_parallel.parallel import GroupTimeouts, join

    quantisation, spread = check_target_quantisation(config.quantisation), _spread(config, place)
    timeouts = GroupTimeouts(config.group_start_s, config.group_timeout_s)

    def load(device: torch.device) -> Checkpoint:
        return load_checkpoint(config.model, config.dtype, str(device), quantisation=quantisation, spread=spread)

    return join(place, timeouts, load, config.kv_tokens)


def _spread(config: VerifierConfig, place: Rank) -> Spread:
    if config.device != "auto" and (place.size > 1 or config.device_map):
        raise InvalidArgument("several devices are not one; leave VERIFIER_DEVICE at auto.")
    return Spread(config.device, place.size, config.device_map, config.device_memory, config.offload_folder)
