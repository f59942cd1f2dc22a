"""A system of real processes: a verifier on vLLM that can be struck, one on the embedded engine, two drafters, and
gateways to the two verifiers together and to each alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from benchmarks.load_generator import LoadResult, run_load
from slipstream.cli.serve import Role
from slipstream.v1 import gateway_pb2
from tests.fleet import Gateway
from tests.loopback import ANY
from tests.vllm.decoding import DRAFT, ROOT, TARGET

READY_S = 240
PYTHON = str(ROOT / ".venv/bin/python")
"""The environment of `make setup`: vLLM's has no room for what the gateway needs."""
PROMPTS = [
    "def read(self, path):",
    "class Server:\n    def __init__(",
    "import os\nimport sys\n\n",
    "for name in names:",
]
QUICK = {"MEASURE_S": "0.5", "MAX_DRAFT_TOKENS": "8", "DTYPE": "float32", "KV_TOKENS": "16384"}
LIMIT_S = 60.0
"""A bound for machines that are busy; what is noticed takes milliseconds."""
UNAVAILABLE: int = grpc.StatusCode.UNAVAILABLE.value[0]
STEP_TIMEOUT_S = 600.0
"""Nothing that a test waits for takes so long: what is noticed is not noticed by it."""


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
    return texts_of(await run_load(server, wanted, len(wanted)))


def texts_of(load: LoadResult) -> list[list[int]]:
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


def verifier_settings(**settings: str) -> dict[str, str]:
    given = QUICK | {"MODEL": TARGET, "LISTEN": ANY} | settings
    return {f"VERIFIER_{name}": value for name, value in given.items()}


async def code_of_end(speaking: Gateway, number: int) -> int:
    """How a session ends, or the stream that it is on."""
    ended = asyncio.create_task(speaking.sessions[number].done.wait())
    broken = asyncio.create_task(speaking.broken())
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([ended, broken], return_when=asyncio.FIRST_COMPLETED)
    if broken.done():
        ended.cancel()
        error = broken.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        return int(error.code().value[0])
    broken.cancel()
    end = speaking.sessions[number].end
    assert end is not None
    return end.failure.code


@dataclass
class System:
    """The vLLM verifier is `tests.vllm.failing_verifier`."""

    vllm: Role
    vllm_address: str
    drafters: dict[str, Role]
    """By address."""
    embedded: str
    """Gateways' addresses: to the embedded verifier, to the one on vLLM, and to both."""
    on_vllm: str
    both: str

    async def start_vllm(self) -> None:
        """Starts it again at its address."""
        await asyncio.wait_for(self.vllm.start({"VERIFIER_LISTEN": self.vllm_address}), READY_S)

    async def committed(self) -> float:
        """Tokens that the verifier on vLLM has committed since it started."""
        return await asyncio.to_thread(_committed, self.vllm.metrics)

    async def in_mid_text(self, tokens: int, plain: list[list[int]]) -> asyncio.Task[list[list[int]]]:
        """Requests to both verifiers of which the one on vLLM has just committed some tokens: again, if the gateway did
        not know of it yet, or all were served before anyone looked."""
        async with asyncio.timeout(120):
            while True:
                before = await self.committed()
                generating = asyncio.create_task(generate(self.both, requests(tokens)))
                while not generating.done():
                    if await self.committed() > before + 10 and not generating.done():
                        return generating
                assert generating.result() == plain

    def toggle_fault(self) -> None:
        """From now on every step of the verifier on vLLM fails in its sampler, or none does again."""
        os.kill(self.vllm.process.pid, signal.SIGUSR1)


def _committed(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("slipstream_verifier_committed"))


@asynccontextmanager
async def running_system(more: Mapping[str, str] | None = None) -> AsyncIterator[System]:
    """`more` are settings of the verifier on vLLM."""
    roles: list[Role] = []

    async def start(module: str, python: str = PYTHON, **settings: str) -> tuple[Role, str]:
        roles.append(role := Role(module, settings, python))
        return role, await asyncio.wait_for(role.start(), READY_S)

    def gateway(verifiers: str, drafters: str = "") -> Any:
        settings = {"VERIFIERS": verifiers, "DRAFTERS": drafters, "LISTEN": ANY, "TOKENIZER": TARGET}
        settings["TRUSTED_DRAFTERS"] = "a,b" if drafters else ""
        return start("gateway", **{f"GATEWAY_{name}": value for name, value in settings.items()})

    speculating = {"VERIFIER_ALWAYS_SPECULATE": "true"}
    on_vllm = verifier_settings(ENGINE="vllm", METRICS_LISTEN="127.0.0.1:0", VLLM_STEP_TIMEOUT_S=str(STEP_TIMEOUT_S))
    draft = {"DRAFTER_MODEL": DRAFT, "DRAFTER_LISTEN": ANY, "DRAFTER_DTYPE": "float32"}
    try:
        (vllm, vllm_address), (_, embedded), *drafters = await asyncio.gather(
            start("tests.vllm.failing_verifier", sys.executable, **on_vllm, **speculating, **(more or {})),
            start("verifier_svc", sys.executable, **verifier_settings(), **speculating),
            start("drafter_svc", **draft),
            start("drafter_svc", **draft),
        )
        named = ",".join(f"{name}={address}" for name, (_, address) in zip("ab", drafters, strict=True))
        gateways = await asyncio.gather(
            gateway(embedded), gateway(vllm_address, named), gateway(f"{vllm_address},{embedded}", named)
        )
        addresses = [address for _, address in gateways]
        yield System(vllm, vllm_address, {address: role for role, address in drafters}, *addresses)
    finally:
        for role in roles[::-1]:
            await role.end()
