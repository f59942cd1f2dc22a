"""Opens the target: in this process, or on vLLM's workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from slipstream.engine.emulated.model import EMULATED
from slipstream.engine.engine import Engine, EngineLost
from slipstream.engine.factory import open_engine
from slipstream.engine.model_thread import ModelThread
from slipstream.engine.models.quantisation import check_target_quantisation
from slipstream.errors import InvalidArgument
from verifier_svc.config import KV_TOKENS, VerifierConfig
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import StepExecutor

if TYPE_CHECKING:
    from verifier_svc.execution.vllm.executor import VLLMExecutor


@asynccontextmanager
async def running_executor(
    opening: Callable[[VerifierConfig], Engine], config: VerifierConfig, thread: ModelThread
) -> AsyncIterator[StepExecutor]:
    """The configured executor, opened on `thread`; an embedded one runs the engine that `opening` returns. vLLM's
    workers end with the block; a lost one ends it with EngineLost."""
    if config.engine == "vllm":
        async with _running_vllm(config, thread) as executor:
            yield executor
        return
    yield EmbeddedExecutor(await thread.run(opening, config))


@asynccontextmanager
async def _running_vllm(config: VerifierConfig, thread: ModelThread) -> AsyncIterator[StepExecutor]:
    executor = await thread.run(_open_vllm, config)
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    executor.core.call_when_lost(partial(loop.call_soon_threadsafe, lost.set))
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_raise_when(lost, executor))
            try:
                yield executor
            finally:
                watching.cancel()
    finally:
        await thread.run(executor.close)


async def _raise_when(lost: asyncio.Event, executor: VLLMExecutor) -> None:
    await lost.wait()
    raise EngineLost(executor.core.lost, reason="WORKER_LOST")


def _open_vllm(config: VerifierConfig) -> VLLMExecutor:
    """Imports vLLM, which not every interpreter has. Raises what `VLLMExecutor` raises."""
    from slipstream.engine.models.checkpoint import describe_checkpoint
    from verifier_svc.execution.vllm.executor import VLLMExecutor

    if config.model.startswith(EMULATED):
        raise InvalidArgument(f"{config.model} has no weights; use VERIFIER_ENGINE=embedded.")
    return VLLMExecutor(config, describe_checkpoint(config.model))


def open_target(config: VerifierConfig) -> Engine:
    """Opens the configured target in this process."""
    quantisation = check_target_quantisation(config.quantisation)
    return open_engine(
        config.model, config.dtype, config.kv_tokens or KV_TOKENS, quantisation, config.lean, config.device
    )
