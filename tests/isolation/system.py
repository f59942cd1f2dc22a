"""Gateway, verifier and drafter with the shipped pair as real processes, two API keys, and what one of them sees."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median

import httpx

from slipstream.client.gateway_endpoint import digest
from slipstream.serving.role import Role
from tests.e2e.conftest import ROOT, starting
from tests.isolation.attacker import client
from tests.isolation.scribe import SCRIBE, TARGET
from tests.isolation.watched_gateway import SIZE
from tests.support.http_client import CHAT_TEMPLATE, events_of

DRAFT = ROOT / "models" / "draft"
KEYS = {"alice": "a" * 40, "bob": "b" * 40}
ALICE = ", sessions = 4, prompt_tokens = 1000, max_tokens = 200000"
"""Limits of the key that attacks, as a cautious operator sets them: no rate, so that no attack ends by itself."""
TOKENS = 32
"""Of each of the neighbour's texts."""
_numbers = count()


@dataclass(frozen=True)
class Times:
    """What a client saw of a text, in seconds."""

    ttft: float
    tpot: float
    gap: float
    """The longest."""


@dataclass
class Seen:
    """Of several texts."""

    texts: list[Times] = field(default_factory=list)

    def middle(self, name: str) -> float:
        return median(getattr(each, name) for each in self.texts)


@dataclass
class Tenants:
    attacker: AttackerProcess
    neighbour: httpx.AsyncClient
    model: str
    gateway: Role
    loop_file: Path

    async def text(self) -> Times:
        """One text of the neighbour, streamed over HTTP."""
        body = {"model": self.model, "prompt": f"# {next(_numbers)}\ndef read(self):\n    " + "x = 1\n    " * 4}
        body |= {"max_tokens": TOKENS, "stream": True, "seed": 7, "temperature": 0}
        began, came = time.monotonic(), []
        async with self.neighbour.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for event in events_of(response):
                if event.data != "[DONE]":
                    assert "error" not in event.json, event.data
                    came.append(time.monotonic())
        gaps = [after - before for before, after in pairwise(came)]
        return Times(came[0] - began, (came[-1] - came[0]) / TOKENS, max(gaps))

    def memory_mib(self) -> float:
        return peak_mib(self.gateway)


def peak_mib(role: Role) -> float:
    """The most memory that the role's process held since this was called last."""
    process = Path("/proc") / str(role.process.pid)
    lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    (process / "clear_refs").write_text("5")
    return int(lines["VmHWM"].split()[0]) / 1024


class AttackerProcess:
    """`tests.isolation.attacker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, value: object) -> str:
        """The line that it answers a line with."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        return await self.line()

    async def line(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the attacker's process has ended"
        return line.decode().strip()

    def begin(self, addresses: dict[str, str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(addresses).encode() + b"\n")

    @asynccontextmanager
    async def attacking(self, name: str, target: str) -> AsyncIterator[Counter[str]]:
        """Codes of the answers, once the block has ended."""
        assert await self.ask([name, target]) == "begun"
        outcomes: Counter[str] = Counter()
        yield outcomes
        outcomes.update(json.loads(await self.ask(None)))


@asynccontextmanager
async def attacker_process() -> AsyncIterator[AttackerProcess]:
    command = [sys.executable, "-m", "tests.isolation.attacker"]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, **pipes)  # type: ignore[arg-type]
    try:
        yield AttackerProcess(process)
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def two_tenants(folder: Path) -> AsyncIterator[Tenants]:
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    limits = {"alice": ALICE, "bob": ""}
    lines = [f'{name} = {{ sha256 = "{digest(key).hex()}"{limits[name]} }}\n' for name, key in KEYS.items()]
    (folder / "keys.toml").write_text("".join(lines))
    loop_file = folder / "loop"
    loop_file.write_bytes(bytes(SIZE))
    async with starting() as (stack, start):
        (_, verifier), (_, drafter) = await asyncio.gather(
            start(
                "verifier_svc",
                VERIFIER_LISTEN="127.0.0.1:0",
                VERIFIER_MODEL=str(TARGET),
                VERIFIER_DTYPE="float32",
                VERIFIER_THREADS="1",
                VERIFIER_KV_TOKENS="16384",
            ),
            start("drafter_svc", DRAFTER_LISTEN="127.0.0.1:0", DRAFTER_MODEL=str(DRAFT), DRAFTER_DTYPE="float32"),
        )
        attacker = await stack.enter_async_context(attacker_process())
        writes = await attacker.line()
        gateway, address = await start(
            "tests.isolation.watched_gateway",
            GATEWAY_LISTEN="127.0.0.1:0",
            GATEWAY_HTTP="127.0.0.1:0",
            GATEWAY_VERIFIERS=f"{verifier},{writes}",
            GATEWAY_DRAFTERS=f"model={drafter}",
            GATEWAY_TOKENIZER=str(TARGET),
            GATEWAY_CHAT_TEMPLATE=str(folder / "chat.jinja"),
            GATEWAY_API_KEYS=str(folder / "keys.toml"),
            GATEWAY_TOOL_CALLS="hermes",
            LOOP_FILE=str(loop_file),
        )
        neighbour = await stack.enter_async_context(client(f"http://{gateway.http}", KEYS["bob"]))
        models = [each["id"] for each in (await neighbour.get("/v1/models")).json()["data"]]
        [model] = set(models) - {SCRIBE}
        attacker.begin({"http": gateway.http, "grpc": address, "key": KEYS["alice"], "model": model})
        yield Tenants(attacker, neighbour, model, gateway, loop_file)
