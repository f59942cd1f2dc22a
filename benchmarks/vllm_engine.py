"""The verifier on vLLM beside vLLM alone and the embedded engine, all with one target, in turn in one run.

usage: python -m benchmarks.vllm_engine [shipped|inflated] [REPEATS]

Greedy, in fp32, one torch thread a process: 1, 6 and 16 requests at once, whose plain text does not loop. Our systems
are asked through a gateway over gRPC; vLLM by itself is called in its own process, without any server. `steal` and
`load` are the machine's while a row was measured. The second table parts a step of our executor on vLLM: building
vLLM's scheduler output, the workers' time, the sampler's share of it, and what the calls between the processes add.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.processes import ANYWHERE, INFLATED, MODELS, inflate, serving
from benchmarks.prompts import held_out
from benchmarks.records import Row, write
from measurement.load.machine import machine_ticks
from measurement.pairs.loops import DISTINCT, distinct_share
from slipstream.serving.fleet import vllm_python
from slipstream.serving.role import Role
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2

AT_ONCE = (1, 6, 16)
TOKENS = 32
PROMPT_TOKENS = 64
DELAY_MS = 5
Prompts = list[list[int]]
System = Callable[[Prompts], Awaitable[tuple[float, float]]]
"""Seconds for these at once, and tokens per round; 0 where that is not known."""


async def load_of(server: str, speculate: bool, prompts: Prompts) -> LoadResult:
    requests = [
        gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=prompt),
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(temperature=0.0),
            speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
            cache_salt=os.urandom(8).hex(),  # what one run computed of a prompt must not make the next one faster
        )
        for prompt in prompts
    ]
    return await run_load(server, requests, len(requests))


async def ours(server: str, speculate: bool, prompts: Prompts) -> tuple[float, float]:
    load = await load_of(server, speculate, prompts)
    return load.wall_s, load.tokens / load.total("rounds")


class Alone:
    """vLLM by itself, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stack: AsyncExitStack, method: str, target: Path) -> Alone:
        pipe = asyncio.subprocess.PIPE
        command = [vllm_python(), "-m", "benchmarks.vllm_alone", method, str(target)]
        alone = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        stack.push_async_callback(alone.end)
        await alone.hear("ready")
        return alone

    async def hear(self, word: str) -> str:
        """What stands behind this word on its next line that begins with it."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(word.encode()):
                return line.decode()[len(word) :]
        raise RuntimeError("vLLM ended")

    async def __call__(self, prompts: Prompts) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": TOKENS}).encode() + b"\n")
        return float(await self.hear("took")), 0.0

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()


async def start(stack: AsyncExitStack, target: Path) -> dict[str, System]:
    async def role(module: str, python: str = sys.executable, **settings: str) -> str:
        made = Role(module, settings, python)
        stack.push_async_callback(made.end)
        return await made.start()

    async def gateway(verifier: str, drafter: str) -> str:
        known = {"GATEWAY_VERIFIERS": verifier, "GATEWAY_DRAFTERS": f"model={drafter}", "GATEWAY_LISTEN": ANYWHERE}
        return await role("gateway", **known, GATEWAY_TRUSTED_DRAFTERS="model", GATEWAY_TOKENIZER=str(target))

    verifier = {"VERIFIER_MODEL": str(target), "VERIFIER_DTYPE": "float32", "VERIFIER_LISTEN": ANYWHERE}
    on_vllm = await role("verifier_svc", vllm_python(), **verifier, VERIFIER_ENGINE="vllm", VERIFIER_THREADS="1")
    embedded = await role("verifier_svc", **verifier, VERIFIER_THREADS="1")
    near = await role("drafter_svc", DRAFTER_MODEL=str(MODELS / "draft"), DRAFTER_LISTEN=ANYWHERE)
    far = await role("benchmarks.delay_line", LINE_TO=near, LINE_DELAY_MS=str(DELAY_MS))
    close = await gateway(on_vllm, near)
    return {
        "vLLM": await Alone.start(stack, "plain", target),
        "vLLM, its n-gram": await Alone.start(stack, "ngram", target),
        "ours on vLLM, plain": partial(ours, close, False),
        "ours on vLLM, drafter at 0 ms": partial(ours, close, True),
        f"ours on vLLM, drafter at {DELAY_MS} ms": partial(ours, await gateway(on_vllm, far), True),
        "ours embedded, drafter at 0 ms": partial(ours, await gateway(embedded, near), True),
    }


async def prompts_without_loops(count: int) -> Prompts:
    """Held-out prompts by the rule of `benchmarks.prompts`; the inflated target's text is the shipped one's."""
    tokenizer = load_tokenizer(str(MODELS / "target"))
    pieces = [tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in held_out(4 * count)]
    async with serving(str(MODELS / "target"), str(MODELS / "draft")) as server:
        plain = (await load_of(server, False, pieces)).completions
    kept = [piece for piece, text in zip(pieces, plain, strict=True) if distinct_share(text.token_ids) >= DISTINCT]
    assert len(kept) >= count
    return kept[:count]


async def measure(target: Path, repeats: int) -> list[Row]:
    prompts, rows = await prompts_without_loops(max(AT_ONCE)), list[Row]()
    async with AsyncExitStack() as stack:
        systems = await start(stack, target)
        for system in systems.values():
            await system(prompts[:2])
        for at_once in AT_ONCE:
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
            before = machine_ticks()
            for _ in range(repeats):
                for name, system in systems.items():
                    taken[name].append(await system(prompts[:at_once]))
            lost, _, passed = (now - then for now, then in zip(machine_ticks(), before, strict=True))
            for name, runs in taken.items():
                speeds = sorted(at_once * TOKENS / seconds for seconds, _ in runs)
                per_round = statistics.median(each for _, each in runs)
                rows.append(
                    {
                        "system": name,
                        "at_once": at_once,
                        "tokens_per_s": statistics.median(speeds),
                        "least": speeds[0],
                        "most": speeds[-1],
                        "tokens_per_round": per_round or None,
                        "steal_percent": 100.0 * lost / max(1, passed),
                        "load": os.getloadavg()[0],
                    }
                )
                print(time.strftime("%H:%M:%S"), rows[-1], flush=True)
    return rows


async def parts_of_a_step(target: Path) -> list[Row]:
    command = [vllm_python(), "-m", "benchmarks.vllm_alone", "steps", str(target)]
    alone = Alone(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
    rows: list[Row] = json.loads(await alone.hear("rows"))
    await alone.end()
    return rows


async def main(kind: str, repeats: int) -> None:
    if kind not in ("shipped", "inflated"):
        sys.exit(__doc__)
    if kind == "inflated":
        inflate()
    target = INFLATED if kind == "inflated" else MODELS / "target"
    command = f"python -m benchmarks.vllm_engine {kind} {repeats}"
    write(f"vllm_engine_{kind}", command, await measure(target, repeats))
    write(f"vllm_engine_{kind}_steps", command, await parts_of_a_step(target))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "inflated", int(sys.argv[2]) if sys.argv[2:] else 5))
