"""A gateway, a verifier and a drafter with the shipped pair as real processes, two API keys, and what one of them sees."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median

import httpx

from slipstream.cli.serve import Role
from slipstream.client.gateway_endpoint import GatewayEndpoint, digest
from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer
from slipstream.v1 import gateway_pb2_grpc, types_pb2
from tests.e2e.conftest import ROOT, starting
from tests.isolation.attacks import SCRIBE, TOOL_CALL, TOOL_CHARACTERS, Attacker
from tests.isolation.watched_gateway import LOOP_FILE, SIZE
from tests.scripted_verifier import ScriptedVerifier, served
from tests.web import CHAT_TEMPLATE, events_of

TARGET, DRAFT = ROOT / "models" / "target", ROOT / "models" / "draft"
KEYS = {"alice": "a" * 40, "bob": "b" * 40}
ALICE = ", sessions = 4, prompt_tokens = 1000, max_tokens = 500"
"""Limits of the key that attacks, as a cautious operator sets them: no rate, so that no attack ends by itself."""
PROMPT_TOKENS, TOKENS = 30, 40
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
    attacker: Attacker
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
        """The most that the gateway's process held since this was called last."""
        process = Path("/proc") / str(self.gateway.process.pid)
        lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        (process / "clear_refs").write_text("5")
        return int(lines["VmHWM"].split()[0]) / 1024


def scribe() -> ScriptedVerifier:
    """A verifier of a model that never closes its tool call, in larger steps than any real one takes."""
    tokenizer = load_tokenizer(str(TARGET))
    ids = tokenizer.encode(TOOL_CALL + "x y " * (TOOL_CHARACTERS // 4), add_special_tokens=False).ids
    model = types_pb2.ModelInfo(
        name=SCRIBE,
        vocabulary_size=4096,
        vocabulary_fingerprint=fingerprint(tokenizer),
        max_length=2 * TOOL_CHARACTERS,
        eos_token_ids=[0],
    )
    return ScriptedVerifier(model, ids, per_round=64)


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
        _, writes = await stack.enter_async_context(served(scribe()))
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
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=f"http://{gateway.http}",
                    headers={"authorization": f"Bearer {key}"},
                    timeout=120,
                    limits=httpx.Limits(max_connections=None),
                    trust_env=False,
                )
            )
            for key in KEYS.values()
        ]
        rpc = await stack.enter_async_context(GatewayEndpoint(address, KEYS["alice"]).channel())
        models = [each["id"] for each in (await clients[1].get("/v1/models")).json()["data"]]
        [model] = set(models) - {SCRIBE}
        host, _, port = gateway.http.rpartition(":")
        stub = gateway_pb2_grpc.GatewayServiceStub(rpc)
        attacker = Attacker(clients[0], rpc, stub, (host, int(port)), model)
        yield Tenants(attacker, clients[1], model, gateway, loop_file)
