"""All three services over real gRPC, models emulated, whose spans come to one OTLP receiver."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from gateway.store.memory import MemoryStore
from gateway.store.session_store import SessionStore
from slipstream.engine.factory import open_engine
from slipstream.errors import Internal
from slipstream.rpc.channel import channel
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.collector import Collected, Collector
from tests.support.fleet import drafter, until, verifier
from verifier_svc.verifier import VerifierServer

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
TARGET = "emulated:base_ms=15"
DRAFT = "emulated:base_ms=1&acceptance=0.8"
KV = 1_000_000
CLIENT = bytes(range(8))
PARENT = ("traceparent", f"00-{'ab' * 16}-{CLIENT.hex()}-01")
UNSAMPLED = ("traceparent", PARENT[1][:-2] + "00")


class System:
    """Gateway, verifiers and drafter that send their spans to one collector."""

    def __init__(self, stack: AsyncExitStack, collector: Collector) -> None:
        self._stack = stack
        self.collector = collector
        self.stub: Any

    async def verifier(self, engine: str = TARGET, clocks: Clocks | None = None, **settings: Any) -> VerifierServer:
        tracing = self.collector.tracing("verifier", clocks)
        return await self._stack.enter_async_context(
            verifier(open_engine(engine, kv_tokens=KV), tracing, **{"silence_s": 0.4} | settings)
        )

    async def drafter(
        self, clocks: Clocks | None = None, stack: AsyncExitStack | None = None, engine: str = DRAFT
    ) -> str:
        tracing = self.collector.tracing("drafter", clocks)
        return await (stack or self._stack).enter_async_context(
            drafter(open_engine(engine, kv_tokens=KV), tracing=tracing)
        )

    async def open(
        self,
        verifiers: list[VerifierServer],
        drafters: list[str],
        store: SessionStore | None = None,
        clocks: Clocks | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: of the gateway."""
        config = GatewayConfig(
            verifiers=tuple(verifier.address for verifier in verifiers),
            tokenizer=TOKENIZER,
            listen="127.0.0.1:0",
            drafters=tuple(f"model={address}" for address in drafters),
            grace_s=0.0,
            **settings,
        )
        tracing = self.collector.tracing("gateway", clocks)
        world = GatewayDependencies(random.Random(5).getrandbits, store=store, tracing=tracing)
        gateway = await self._stack.enter_async_context(running(config, world))
        await gateway.ready()
        # All of them, so that the first verifier gets the first request.
        await until(lambda: all(known.ready for known in gateway.router.verifiers))
        await until(lambda: all(known.present for known in gateway.router.drafters))
        line = await self._stack.enter_async_context(channel(gateway.address))
        self.stub = gateway_pb2_grpc.GatewayServiceStub(line)

    async def start(self) -> None:
        """Returns once the drafter's candidates come, which requests that are not sampled show."""
        await self.open([await self.verifier()], [await self.drafter()])
        while not (await read_events(self.call(20, parent=UNSAMPLED)))[-1].finished.statistics.drafted:
            pass

    def call(self, tokens: int, prompt: int = 7, parent: tuple[str, str] | None = PARENT, **asked: Any) -> Any:
        request = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=[prompt, 8, 9]),
            max_tokens=tokens,
            **{"sampling": gateway_pb2.SamplingOptions(temperature=0.0)} | asked,
        )
        return self.stub.Generate(request, metadata=(parent,) if parent else ())

    async def interrupted(self, tokens: int = 40) -> str:
        """The trace of a request whose client left in the middle."""
        call = self.call(100_000)
        while tokens > 0:
            tokens -= len((await call.read()).delta.token_ids)
        call.cancel()
        return PARENT[1].split("-")[1]


def check(collected: list[Collected]) -> None:
    """What must hold of all spans, however their requests ended."""
    assert len({(span.trace, span.id) for span in collected}) == len(collected)
    for each in collected:
        assert each.ended >= each.began > 0.0, each
        assert set(each.attributes) <= spans.SPANS[each.name], each
        for name, attributes in each.events:
            assert set(attributes) <= spans.EVENTS[name], each


async def read_events(call: Any) -> list[Any]:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


class Refusing(MemoryStore):
    """Takes no more than one write."""

    writes = 0

    async def append(self, *args: Any, **options: Any) -> None:
        self.writes += 1
        if self.writes > 1:
            raise Internal("it cannot be written.")
        await super().append(*args, **options)
