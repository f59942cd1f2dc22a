"""Services on vLLM as real processes: default settings, workers that are killed or hang, a verifier that dies early."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil
import pytest

from slipstream.cli.serve import Role
from slipstream.client.load_generator import run_load
from slipstream.engine.engine import EngineLost
from slipstream.v1 import gateway_pb2
from tests.vllm.conftest import open_executor
from tests.vllm.decoding import ROOT, SAMPLINGS, TARGET, Case, decode, guesses, prompts, texts

READY_S = 150
PYTHON = str(ROOT / ".venv/bin/python")
"""The environment of `make setup`: vLLM's has no room for what the gateway needs."""
PROMPTS = [
    "def read(self, path):",
    "class Server:\n    def __init__(",
    "import os\nimport sys\n\n",
    "for name in names:",
]
QUICK = {"MEASURE_S": "0.5", "MAX_DRAFT_TOKENS": "8", "DTYPE": "float32", "KV_TOKENS": "16384"}


def requests(tokens: int, *, speculate: bool = True) -> list[gateway_pb2.GenerateRequest]:
    return [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=tokens,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(temperature=0.8, seed=seed),
            speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
        )
        for seed, prompt in enumerate(PROMPTS)
    ]


async def generate(server: str, wanted: list[gateway_pb2.GenerateRequest]) -> list[list[int]]:
    load = await run_load(server, wanted, len(wanted))
    return [completion.token_ids for completion in load.completions]


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def workers(pid: int) -> list[psutil.Process]:
    """vLLM's worker processes below this one: those that multiprocessing spawned."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [each for each in below if _is_worker(each)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        line = " ".join(process.cmdline())
        return "spawn_main" in line or "VLLM::" in line or "VllmWorker" in line
    except psutil.Error:
        return False


def gone(processes: list[psutil.Process]) -> bool:
    return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)


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


@asynccontextmanager
async def starting() -> AsyncIterator[Callable[..., Any]]:
    roles: list[Role] = []

    async def start(module: str, **settings: str) -> tuple[Role, str]:
        roles.append(Role(module, settings, PYTHON if module == "gateway" else sys.executable))
        return roles[-1], await asyncio.wait_for(roles[-1].start(), READY_S)

    try:
        yield start
    finally:
        for role in roles[::-1]:
            await role.end()


def verifier_settings(**settings: str) -> dict[str, str]:
    given = QUICK | {"MODEL": TARGET, "LISTEN": "127.0.0.1:0"} | settings
    return {f"VERIFIER_{name}": value for name, value in given.items()}


def committed(address: str) -> float:
    """Tokens that the verifier with these metrics has committed."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("slipstream_verifier_committed"))


async def in_mid_text(server: str, tokens: int, metrics: str, plain: list[list[int]]) -> asyncio.Task[list[list[int]]]:
    """Requests of which the verifier with these metrics has just committed some tokens: again, if the gateway did not
    know of it yet, or all were served before anyone looked."""
    async with asyncio.timeout(120):
        while True:
            before = await asyncio.to_thread(committed, metrics)
            generating = asyncio.create_task(generate(server, requests(tokens)))
            while not generating.done():
                if await asyncio.to_thread(committed, metrics) > before + 10 and not generating.done():
                    return generating
            assert generating.result() == plain


async def test_a_killed_worker_ends_its_verifier_and_sessions_go_on_elsewhere_with_the_same_text() -> None:
    """Two verifiers, one on vLLM and one embedded; the worker is killed while both have sessions in mid-text."""
    tokens = 400
    async with starting() as start:
        _, embedded = await start("verifier_svc", **verifier_settings())
        lost, vllm = await start("verifier_svc", **verifier_settings(ENGINE="vllm", METRICS_LISTEN="127.0.0.1:0"))
        both = {"GATEWAY_TOKENIZER": TARGET, "GATEWAY_LISTEN": "127.0.0.1:0", "GATEWAY_DRAFTERS": ""}
        _, alone = await start("gateway", **both | {"GATEWAY_VERIFIERS": embedded})
        plain = await generate(alone, requests(tokens))
        _, server = await start("gateway", **both | {"GATEWAY_VERIFIERS": f"{vllm},{embedded}"})
        generating = await in_mid_text(server, tokens, lost.metrics, plain)
        processes = workers(lost.process.pid)
        assert processes
        for process in processes:
            process.kill()
        assert await asyncio.wait_for(lost.ended(), 60) == 1
        assert await asyncio.wait_for(generating, 60) == plain


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


def test_tensor_parallel_workers_decide_the_same_and_one_that_hangs_is_given_up(embedded: Any) -> None:
    cases = [Case(prompt, sampling, 24) for prompt, sampling in zip(prompts(8), SAMPLINGS, strict=True)]
    plain = texts(decode(embedded, cases))
    executor = open_executor(vllm_args="--tensor-parallel-size 2", vllm_step_timeout_s=15.0, kv_tokens=4096)
    try:
        processes = [psutil.Process(pid) for pid in executor.core.worker_pids]
        assert len(processes) == 2
        assert texts(decode(executor, cases, guesses(plain, 0.8))) == plain
        processes[1].send_signal(signal.SIGSTOP)
        with pytest.raises(EngineLost, match="did not answer for 15 s"):
            decode(executor, cases)
        until(lambda: gone(processes))
        with pytest.raises(EngineLost):
            decode(executor, cases[:1])
    finally:
        executor.close()
