"""How a worker process of vLLM ended is what the verifier ends with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.engine import EngineLost
from slipstream.engine.model_thread import ModelThread
from verifier_svc.config import VerifierConfig
from verifier_svc.execution import target
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.vllm import engine_core
from verifier_svc.execution.vllm.engine_core import end_of, wait_for_end


@pytest.mark.parametrize(
    ("codes", "sentence"),
    [
        ([None, -signal.SIGKILL], "a vLLM worker was killed by SIGKILL"),
        ([3, None], "a vLLM worker ended with status 3"),
        ([None], "a vLLM worker ended"),
    ],
)
def test_the_first_worker_that_is_gone_is_named(
    codes: list[int | None], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "STATUS_S", 0.0)
    assert end_of([SimpleNamespace(proc=SimpleNamespace(exitcode=code)) for code in codes]) == sentence


@pytest.mark.parametrize("described", [end_of, wait_for_end])
def test_the_status_of_a_worker_may_come_after_its_end_is_seen(described: Callable[[Any], str]) -> None:
    """A killed process closes its files, its sentinel among them, before its parent can read how it ended."""

    class Process:
        def __init__(self, sentinel: int) -> None:
            self.sentinel, self.codes = sentinel, iter((None, None, -signal.SIGKILL))

        @property
        def exitcode(self) -> int | None:
            return next(self.codes)

    sentinel, alive = os.pipe()
    os.close(alive)
    try:
        assert described([SimpleNamespace(proc=Process(sentinel))]) == "a vLLM worker was killed by SIGKILL"
    finally:
        os.close(sentinel)


async def test_a_verifier_whose_workers_are_lost_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()

    class Core:
        lost = "node 1 failed: no memory"

        def call_when_lost(self, call: Callable[[], object]) -> None:
            call()

    def opened(config: VerifierConfig) -> Any:
        return SimpleNamespace(core=Core(), close=lambda: closed.append(True))

    monkeypatch.setattr(target, "_open_vllm", opened)
    with pytest.raises(ExceptionGroup) as ended:
        async with (
            ModelThread(0) as thread,
            target.running_executor(target.open_target, VerifierConfig(model="m", engine="vllm"), thread) as executor,
        ):
            assert not isinstance(executor, EmbeddedExecutor)
            await thread.run(lambda: None)
            while True:
                await thread.run(lambda: None)
    (error,) = ended.value.exceptions
    assert isinstance(error, EngineLost) and error.message == "node 1 failed: no memory" and closed
