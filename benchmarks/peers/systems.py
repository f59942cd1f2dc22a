"""The systems that are compared: how each is started, and asked for greedy tokens."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load_generator import run_load
from benchmarks.peers import environments
from slipstream.engine.cpu_cores import available_cores
from slipstream.errors import FailedPrecondition
from slipstream.proposers.registry import METHODS
from slipstream.serving.default_drafters import DEFAULT_DRAFTERS
from slipstream.serving.fleet import Fleet, vllm_python
from slipstream.serving.options import EMBEDDED
from slipstream.serving.placement import computes_on_own_cores, place
from slipstream.v1 import gateway_pb2

Tokens = list[list[int]]
CONTEXT, CHAT_CONTEXT = 256, 1536
"""Tokens of a sequence in llama.cpp's cache, for each of its slots."""
SLOTS = 16
START_S = 300.0
WHOLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Sampling from the whole distribution: llama.cpp cuts it by default."""


@dataclass(frozen=True, slots=True)
class Answer:
    seconds: float
    outputs: Tokens
    """Empty where the system does not tell."""
    decoding_s: float | None = None
    """From the first token on, of one prompt; None where the system does not tell."""
    passes: int | None = None
    """Of the target that decided these tokens, likewise."""


System = Callable[[Tokens, int], Awaitable[Answer]]
"""Continues these prompts, all at once, by so many tokens each."""


@dataclass(frozen=True, slots=True)
class Setting:
    target: str
    """`shipped`, `inflated` or a number of parameters, such as `3B`."""
    dtype: str
    """`float32` or `bfloat16`."""
    threads: int
    temperature: float = 0.0
    chat: bool = False
    """Answers to chat prompts, which end where the model ends them; else always as many tokens as asked for."""

    @property
    def asked(self) -> dict[str, object]:
        """For the workers of peers."""
        return {"temperature": self.temperature, "ends": self.chat}

    @property
    def gguf(self) -> str:
        return environments.GGUF_TYPES[self.dtype]


Start = Callable[[AsyncExitStack, Setting], Awaitable[System]]


class Worker:
    """A process that reads lines of prompts; see `benchmarks.peers.worker` and `benchmarks.vllm_alone`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stack: AsyncExitStack, threads: int, *command: str) -> Worker:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        pipe = asyncio.subprocess.PIPE
        worker = cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environment, limit=1 << 24
            )
        )
        stack.push_async_callback(worker.end)
        async with asyncio.timeout(START_S):
            await worker.hear("ready")
        return worker

    async def hear(self, word: str) -> str:
        """The next line that begins with this. Raises FailedPrecondition where the process ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(word.encode()):
                return line.decode()
        raise FailedPrecondition(f"the process ended: status {await self._process.wait()}.")

    async def ask(self, prompts: Tokens, count: int, **asked: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": count} | asked).encode() + b"\n")
        await self._process.stdin.drain()

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()


async def in_worker(library: str, method: str, stack: AsyncExitStack, setting: Setting) -> System:
    names = (setting.target, setting.target if setting.chat else "draft")
    if library == "openvino":
        python = await asyncio.to_thread(environments.openvino_python)
        models = [environments.openvino_model(model) for model in names]
    else:
        python, models = sys.executable, [environments.checkpoint(model) for model in names]
    script = str(Path(__file__).with_name("worker.py"))
    words = [library, method, *map(str, models), str(setting.threads), setting.dtype]
    worker = await Worker.start(stack, setting.threads, python, script, *words)

    async def ask(prompts: Tokens, count: int) -> Answer:
        await worker.ask(prompts, count, **setting.asked)
        told = json.loads(await worker.hear("{"))
        return Answer(told["seconds"], told["outputs"], told.get("decoding_s"))

    return ask


async def vllm(method: str, stack: AsyncExitStack, setting: Setting) -> System:
    words = (method, str(environments.checkpoint(setting.target)), setting.dtype)
    worker = await Worker.start(stack, setting.threads, vllm_python(), "-m", "benchmarks.vllm_alone", *words)

    async def ask(prompts: Tokens, count: int) -> Answer:
        await worker.ask(prompts, count, **setting.asked)
        told = json.loads(await worker.hear("{"))
        return Answer(told["seconds"], told["outputs"])

    return ask


async def llama_cpp(
    options: tuple[str, ...], stack: AsyncExitStack, setting: Setting, kind: str | None = None
) -> System:
    """With weights of this kind of GGUF; None: of the setting's type."""
    program, kind = await asyncio.to_thread(environments.llama_server), kind or setting.gguf
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads, context = str(setting.threads), (CHAT_CONTEXT if setting.chat else CONTEXT) * SLOTS
    draft = ("-md", str(environments.gguf("draft", kind))) if "draft-simple" in options else ()
    command = [
        *(program, "-m", str(environments.gguf(setting.target, kind)), "--host", "127.0.0.1", "--port", str(port)),
        *("-t", threads, "-tb", threads, "-c", str(context), "-np", str(SLOTS), "-cram", "0", *draft, *options),
    ]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    stack.push_async_callback(_end, process)
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits, trust_env=False)
    await stack.enter_async_context(client)
    async with asyncio.timeout(START_S):
        while not await _is_healthy(client):
            if process.returncode is not None:
                raise FailedPrecondition(f"{' '.join(command)} ended: status {process.returncode}.")
            await asyncio.sleep(0.2)

    async def one(prompt: list[int], count: int) -> dict[str, Any]:
        wanted: dict[str, Any] = {"prompt": prompt, "n_predict": count, "cache_prompt": False, "return_tokens": True}
        wanted |= {"temperature": setting.temperature, "ignore_eos": not setting.chat, "seed": sum(prompt)}
        answer = await client.post("/completion", json=wanted | (WHOLE if setting.temperature else {}))
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
        return told

    async def ask(prompts: Tokens, count: int) -> Answer:
        began = time.perf_counter()
        told = await asyncio.gather(*(one(prompt, count) for prompt in prompts))
        decoding_s = told[0]["timings"]["predicted_ms"] / 1e3
        return Answer(time.perf_counter() - began, [each["tokens"] for each in told], decoding_s)

    return ask


async def slipstream(methods: Sequence[str], stack: AsyncExitStack, setting: Setting) -> System:
    """As `slipstream serve` places these drafters on these cores, asked over gRPC through its gateway; without any,
    plain decoding in the presence of the default ones."""
    drafting = {method: "draft" if METHODS[method].needs_model else "" for method in methods or DEFAULT_DRAFTERS}
    address = await serving(stack, setting, {name: _folder(model) for name, model in drafting.items()})
    return asking(address, setting, [] if methods else None)


def _folder(model: str) -> str:
    return str(environments.checkpoint(model)) if model else ""


async def serving(stack: AsyncExitStack, setting: Setting, drafting: Mapping[str, str]) -> str:
    """The gateway's address of a fleet with these methods, each with its model's folder, empty for none."""
    placed = place(available_cores(), list(drafting), None, setting.threads, own_cores=computes_on_own_cores(EMBEDDED))
    target = str(environments.checkpoint(setting.target))
    fleet = Fleet(target, drafting, setting.dtype, placed.threads, in_verifier=placed.in_verifier)
    stack.push_async_callback(fleet.stop)
    return await fleet.start("127.0.0.1:0", "memory")


def asking(address: str, setting: Setting, drafters: Sequence[str] | None) -> System:
    """The fleet at this address with these of its drafters; an empty list: those that it chooses, None: none."""
    speculation = gateway_pb2.SpeculationOptions(disabled=drafters is None, drafters=drafters or [])

    async def ask(prompts: Tokens, count: int) -> Answer:
        requests = [
            gateway_pb2.GenerateRequest(
                prompt_token_ids=gateway_pb2.TokenIds(token_ids=prompt),
                max_tokens=count,
                ignore_eos=not setting.chat,
                sampling=gateway_pb2.SamplingOptions(temperature=setting.temperature, seed=sum(prompt)),
                speculation=speculation,
                cache_salt=os.urandom(8).hex(),
                stream_interval=count,  # as of the others, one answer
            )
            for prompt in prompts
        ]
        load = await run_load(address, requests, len(requests))
        first = load.completions[0]
        decoding_s, rounds = (first.tpot_s or 0.0) * (len(first.token_ids) - 1), first.finished.statistics.rounds
        return Answer(load.wall_s, [completion.token_ids for completion in load.completions], decoding_s, rounds)

    return ask


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


DRAFT_DEFAULT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "3")
DRAFT_TUNED = ("--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.3")
SYSTEMS: dict[str, Start] = {
    "llama.cpp": partial(llama_cpp, ()),
    "llama.cpp, draft, k = 3": partial(llama_cpp, DRAFT_DEFAULT),
    "llama.cpp, draft, k = 8": partial(llama_cpp, DRAFT_TUNED),
    "transformers": partial(in_worker, "transformers", "plain"),
    "transformers, assisted": partial(in_worker, "transformers", "assisted"),
    "transformers, assisted, k = 4": partial(in_worker, "transformers", "tuned"),
    "transformers, prompt lookup": partial(in_worker, "transformers", "lookup"),
    "OpenVINO GenAI": partial(in_worker, "openvino", "plain"),
    "OpenVINO GenAI, draft": partial(in_worker, "openvino", "draft"),
    "vLLM": partial(vllm, "plain"),
    "vLLM, n-gram": partial(vllm, "ngram"),
    "Slipstream, plain": partial(slipstream, ()),
    "Slipstream, draft model alone": partial(slipstream, ("model",)),
    "Slipstream": partial(slipstream, DEFAULT_DRAFTERS),
}
