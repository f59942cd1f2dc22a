"""Executors and services on vLLM. Collected by the interpreter of `make setup-vllm` alone: `make test-vllm`."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

HANGING_S = 10.0
"""Seconds after which the executor of all tests gives a worker up."""

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def settings(**changes: Any) -> Any:
    """Blocks are small, so that prompts of tests fill some: vLLM's own for CPUs have 128 tokens."""
    from tests.vllm.decoding import TARGET
    from verifier_svc.config import VerifierConfig

    defaults = {
        "model": TARGET,
        "engine": "vllm",
        "dtype": "float32",
        "kv_tokens": 16_384,
        "vllm_args": "--block-size 32",
    }
    return VerifierConfig(**(defaults | changes))


def open_executor(**changes: Any) -> Any:
    from slipstream.engine.models.checkpoint import describe_checkpoint
    from verifier_svc.execution.vllm.executor import VLLMExecutor

    config = settings(**changes)
    return VLLMExecutor(config, describe_checkpoint(config.model))


@pytest.fixture(scope="session")
def executor() -> Iterator[Any]:
    opened = open_executor(vllm_step_timeout_s=HANGING_S)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def embedded() -> Any:
    from slipstream.engine.factory import open_engine
    from tests.vllm.decoding import TARGET
    from verifier_svc.execution.embedded import EmbeddedExecutor

    return EmbeddedExecutor(open_engine(TARGET, "float32", 16_384))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def others() -> AsyncIterator[Any]:
    from tests.vllm.system import running_others

    async with running_others() as running:
        yield running
