"""A system of real processes: a verifier on vLLM that can be struck, one on the embedded engine, two drafters, and
gateways to the two verifiers together and to each alone. What is not on vLLM is started once for all tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import psutil

from benchmarks.load_generator import LoadResult, run_load
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2
from tests.support.fleet import Gateway
from tests.support.loopback_addresses import ANY
from tests.vllm.decoding import DRAFT, ROOT, TARGET

READY_S = 400
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
SPECULATING = {"VERIFIER_ALWAYS_SPECULATE": "true"}
TOKENS = 250
"""Of the longest texts."""
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
class Others:
    """What a system has beside its verifier on vLLM."""

    drafters: dict[str, Role]
    """By address."""
    verifier: str
    """On the embedded engine."""
    gateway: str
    """To that verifier alone."""
    plain: list[list[int]]
    """Texts of `requests(TOKENS)`, without candidates, by that verifier."""


@dataclass
class System:
    """The vLLM verifier is `tests.vllm.failing_verifier`."""

    vllm: Role
    vllm_address: str
    others: Others
    on_vllm: str
    """Gateways' addresses: to the verifier on vLLM, and to both."""
    both: str

    def plain(self, tokens: int) -> list[list[int]]:
        """Texts of `requests`, without candidates, by the embedded engine."""
        return [text[:tokens] for text in self.others.plain]

    async def start_vllm(self) -> None:
        """Starts it again at its address."""
        await asyncio.wait_for(self.vllm.start({"VERIFIER_LISTEN": self.vllm_address}), READY_S)

    async def committed(self) -> float:
        """Tokens that the verifier on vLLM has committed since it started."""
        return await asyncio.to_thread(_committed, self.vllm.metrics)

    async def in_mid_text(self, tokens: int) -> asyncio.Task[list[list[int]]]:
        """Requests to both verifiers of which the one on vLLM has just committed some tokens: again, if the gateway did
        not know of it yet, or all were served before anyone looked."""
        async with asyncio.timeout(120):
            while True:
                before = await self.committed()
                generating = asyncio.create_task(generate(self.both, requests(tokens)))
                while not generating.done():
                    if await self.committed() > before + 10 and not generating.done():
                        return generating
                assert generating.result() == self.plain(tokens)

    def toggle_fault(self) -> None:
        """From now on every step of the verifier on vLLM fails in its sampler, or none does again."""
        os.kill(self.vllm.process.pid, signal.SIGUSR1)


def _committed(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("slipstream_verifier_committed"))


async def start(stack: AsyncExitStack, module: str, python: str = PYTHON, **settings: str) -> tuple[Role, str]:
    """A role that ends with the stack, and its address."""
    role = Role(module, settings, python)
    stack.push_async_callback(role.end)
    return role, await asyncio.wait_for(role.start(), READY_S)


async def start_gateway(stack: AsyncExitStack, verifiers: str, drafters: str = "") -> str:
    settings = {"VERIFIERS": verifiers, "DRAFTERS": drafters, "LISTEN": ANY, "TOKENIZER": TARGET}
    settings["TRUSTED_DRAFTERS"] = "a,b" if drafters else ""
    settings["MIXED_ARITHMETIC"] = "mark"  # sessions move between vLLM and the embedded engine here, in float32
    _, address = await start(stack, "gateway", **{f"GATEWAY_{name}": value for name, value in settings.items()})
    return address


@asynccontextmanager
async def running_others() -> AsyncIterator[Others]:
    draft = {"DRAFTER_MODEL": DRAFT, "DRAFTER_LISTEN": ANY, "DRAFTER_DTYPE": "float32"}
    async with AsyncExitStack() as stack:
        (_, verifier), *drafters = await asyncio.gather(
            start(stack, "verifier_svc", sys.executable, **verifier_settings(), **SPECULATING),
            start(stack, "drafter_svc", **draft),
            start(stack, "drafter_svc", **draft),
        )
        gateway = await start_gateway(stack, verifier)
        plain = await generate(gateway, requests(TOKENS, speculate=False))
        yield Others({address: role for role, address in drafters}, verifier, gateway, plain)


@asynccontextmanager
async def running_system(others: Others, more: Mapping[str, str] | None = None) -> AsyncIterator[System]:
    """`more` are settings of the verifier on vLLM."""
    settings = verifier_settings(ENGINE="vllm", METRICS_LISTEN="127.0.0.1:0", VLLM_STEP_TIMEOUT_S=str(STEP_TIMEOUT_S))
    named = ",".join(f"{name}={address}" for name, address in zip("ab", others.drafters, strict=True))
    async with AsyncExitStack() as stack:
        vllm, address = await start(
            stack, "tests.vllm.failing_verifier", sys.executable, **settings, **SPECULATING, **(more or {})
        )
        on_vllm, both = await asyncio.gather(
            start_gateway(stack, address, named), start_gateway(stack, f"{address},{others.verifier}", named)
        )
        yield System(vllm, address, others, on_vllm, both)
