"""A verifier on vLLM as people start it, one that dies early, and tensor parallel workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest

from slipstream.engine.engine import EngineLost
from tests.vllm.conftest import open_executor
from tests.vllm.decoding import ROOT, SAMPLINGS, Case, Decoding, decode, guesses, prompts, texts
from tests.vllm.system import PROMPTS, PYTHON, generate, gone, requests, until, verifier_settings, workers
from verifier_svc.execution.vllm import engine_options
from verifier_svc.execution.vllm.messages import StepMasks


@contextmanager
def serving(*options: str) -> Iterator[str]:
    command = [PYTHON, "-m", "slipstream", "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready grpc="), line
        yield line.split()[1].removeprefix("grpc=")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_serve_with_default_settings_gives_one_text_with_and_without_candidates() -> None:
    """Every setting but the type of the numbers is the default one, the measurement at the start and the interpreter
    with vLLM, which is found, included."""
    with serving("--engine", "vllm", "--dtype", "float32") as server:
        plain = await generate(server, requests(48, speculate=False))
        assert [len(text) for text in plain] == [48] * len(PROMPTS)
        assert await generate(server, requests(48)) == plain


async def test_workers_end_with_a_verifier_that_is_killed_while_it_starts() -> None:
    environment = os.environ | verifier_settings(ENGINE="vllm")
    process = subprocess.Popen([sys.executable, "-m", "verifier_svc"], cwd=ROOT, env=environment)
    try:
        until(lambda: bool(workers(process.pid)))
        started = workers(process.pid)
    finally:
        process.kill()
        process.wait()
    until(lambda: gone(started))


def test_tensor_parallel_workers_decide_the_same_and_one_that_fails_alone_ends_all(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first one's answer is read. What the second would compute after a step that it failed is wrong."""
    cases = [Case(prompt, sampling, 24) for prompt, sampling in zip(prompts(8), SAMPLINGS, strict=True)]
    plain = texts(decode(embedded, cases))
    given = engine_options.engine_args

    def failing(*settings: Any) -> Any:
        arguments = given(*settings)
        arguments.worker_cls = "tests.vllm.failing_worker.FailingWorker"
        return arguments

    monkeypatch.setattr(engine_options, "engine_args", failing)
    executor = open_executor(vllm_args="--tensor-parallel-size 2", kv_tokens=4096)
    try:
        processes = [psutil.Process(pid) for pid in executor.core.worker_pids]
        assert len(processes) == 2
        assert texts(decode(executor, cases, guesses(plain, 0.8))) == plain
        running = Decoding(executor)
        for case in cases:
            running.open(case)
        for _ in range(8):
            running.step()
        with monkeypatch.context() as patch:
            masks = StepMasks([], *np.zeros((2, 0), np.int64), np.zeros((0, 512), np.uint8))
            patch.setattr(executor, "_masks", lambda *step: masks)
            running.step()
        with pytest.raises(EngineLost, match=f"a vLLM worker ended with status {os.EX_SOFTWARE}"):
            running.step()
        until(lambda: gone(processes))
        with pytest.raises(EngineLost):
            decode(executor, cases[:1])
    finally:
        executor.close()
