"""The gateway's application code serves clients that come by no gRPC: what any other protocol in front of it does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.auth.api_keys import ApiKeys
from gateway.auth.tenant import OPEN
from gateway.config import GatewayConfig
from gateway.configured_workers import ConfiguredWorkers
from gateway.gateway import drain
from gateway.request_context import RequestContext
from gateway.sessions.output_stream import Event
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.run import GatewayContext
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.telemetry.observers import GatewayObservers
from gateway.telemetry.request_metrics import RequestMetrics
from gateway.text.tokenizer import Tokenizer
from slipstream.client.completion import TRACE_ID
from slipstream.client.gateway_endpoint import digest
from slipstream.errors import Aborted, NotFound, Unauthenticated, Unavailable
from slipstream.rpc.channel import dialer
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import Server
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.support.collector import Collector
from tests.support.scripted_gateway import Setting
from tests.support.scripted_verifier import ScriptedVerifier, served

REQUEST = gateway_pb2.GenerateRequest(prompt="Tell me.", max_tokens=40)


class Client:
    """Collects the events of its calls."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.events: list[Event] = []

    async def send(self, event: Event) -> None:
        self.events.append(event)
        self.started.set()

    @property
    def session_id(self) -> str:
        first = self.events[0]
        assert isinstance(first, gateway_pb2.Started)
        return first.session_id

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, gateway_pb2.Delta) for token in event.token_ids]

    @property
    def finished(self) -> gateway_pb2.Finished:
        last = self.events[-1]
        assert isinstance(last, gateway_pb2.Finished)
        return last


@asynccontextmanager
async def registry_of(
    folder: Path, verifier: ScriptedVerifier, tracing: Tracing | None = None
) -> AsyncIterator[SessionRegistry]:
    async with served(verifier) as (address, _):
        config = GatewayConfig(verifiers=(address,), tokenizer=str(folder))
        tokenizer = Tokenizer(load_tokenizer(str(folder)), config.max_prompt_bytes)
        metrics = RequestMetrics()
        workers = ConfiguredWorkers(config, tokenizer.fingerprint, lambda role: dialer(role, None), ByteCounter())
        router = workers.router(asyncio.get_running_loop().time)
        context = GatewayContext(
            config, router, random.Random(3).getrandbits, observers=GatewayObservers(metrics, tracing)
        )
        store = MemoryStore(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
        registry = SessionRegistry(context, tokenizer, store, None)
        loops = [asyncio.create_task(worker.run()) for worker in router.workers]
        try:
            while not router.verifiers[0].ready:
                await router.changes.wait()
            yield registry
        finally:
            await registry.close()
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            for worker in router.workers:
                await worker.close()


async def test_a_session_is_generated_rolled_back_and_resumed(setting: Setting, folder: Path) -> None:
    verifier = setting.verifier()
    async with registry_of(folder, verifier) as sessions:
        client, again = Client(), Client()
        await sessions.generate(REQUEST, RequestContext(), client.send)
        assert client.tokens == verifier.script[:40]
        assert client.finished.reason == verifier_pb2.FINISH_REASON_LENGTH
        kept = gateway_pb2.RollbackRequest(session_id=client.session_id, output_tokens=10)
        assert (await sessions.roll_back(kept, OPEN)).revision == 1
        resume = gateway_pb2.ResumeRequest(session_id=client.session_id, offset=10)
        await sessions.resume(resume, RequestContext(), again.send)
        assert client.tokens[:10] + again.tokens == verifier.script[:40]
        record = await sessions.describe(client.session_id, OPEN)
        assert list(record.output_token_ids) == verifier.script[:40]
        with pytest.raises(Aborted, match="rolled back"):
            resume.revision = 0
            await sessions.resume(resume, RequestContext(), again.send)
        with pytest.raises(NotFound):
            await sessions.cancel("nothing", OPEN)


async def test_a_session_is_cancelled_while_its_client_follows_it(setting: Setting, folder: Path) -> None:
    async with registry_of(folder, setting.verifier(limit=9)) as sessions:
        client = Client()
        call = asyncio.create_task(sessions.generate(REQUEST, RequestContext(), client.send))
        await client.started.wait()
        await sessions.cancel(client.session_id, OPEN)
        await call
        assert client.finished.reason == verifier_pb2.FINISH_REASON_CANCELLED


async def test_the_session_of_a_client_that_left_can_be_resumed(setting: Setting, folder: Path) -> None:
    verifier = setting.verifier(limit=9)
    async with registry_of(folder, verifier) as sessions:
        client, again = Client(), Client()
        call = asyncio.create_task(sessions.generate(REQUEST, RequestContext(), client.send))
        await client.started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        verifier.limit = None
        resume = gateway_pb2.ResumeRequest(session_id=client.session_id, offset=len(client.tokens))
        await sessions.resume(resume, RequestContext(), again.send)
        assert client.tokens + again.tokens == verifier.script[:40]
        assert again.finished.reason == verifier_pb2.FINISH_REASON_LENGTH


async def test_a_gateway_that_ends_waits_for_clients_of_every_protocol(setting: Setting, folder: Path) -> None:
    verifier = setting.verifier(limit=9)
    async with registry_of(folder, verifier) as sessions:
        client = Client()
        call = asyncio.create_task(sessions.generate(REQUEST, RequestContext(), client.send))
        await client.started.wait()
        server = Server([])
        await server.start("127.0.0.1:0")
        draining = asyncio.create_task(drain(server, sessions, 60.0))
        await asyncio.wait([draining], timeout=0.3)
        assert not draining.done() and not call.done()
        await sessions.cancel(client.session_id, OPEN)
        async with asyncio.timeout(30):
            await draining
        await call
        assert client.finished.reason == verifier_pb2.FINISH_REASON_CANCELLED


async def test_clients_of_every_protocol_are_asked_to_resume_when_the_grace_is_over(
    setting: Setting, folder: Path
) -> None:
    async with registry_of(folder, setting.verifier(limit=9)) as sessions:
        client = Client()
        call = asyncio.create_task(sessions.generate(REQUEST, RequestContext(), client.send))
        await client.started.wait()
        server = Server([])
        await server.start("127.0.0.1:0")
        await drain(server, sessions, 0.1)
        with pytest.raises(Unavailable) as raised:
            await call
        assert raised.value.reason == "SUSPENDED"


async def test_a_trace_is_continued_from_headers_and_named_in_trailers(
    setting: Setting, folder: Path, collector: Collector
) -> None:
    async with registry_of(folder, setting.verifier(), collector.tracing("gateway", None)) as sessions:
        context = RequestContext([("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01")])
        await sessions.generate(REQUEST, context, Client().send)
        assert context.trailers[TRACE_ID] == "ab" * 16
    assert "generate" in {span.name for span in await collector.spans()}


async def test_a_session_belongs_to_the_tenant_that_its_context_names(
    setting: Setting, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'{name} = {{ sha256 = "{digest(name).hex()}" }}\n' for name in ("alice", "bob")))
    keys = ApiKeys(str(file))
    async with registry_of(folder, setting.verifier()) as sessions:

        async def generate(client: Client) -> None:
            context = RequestContext([("authorization", "Bearer alice")])
            context = replace(context, tenant=await keys.authenticate(context))
            await sessions.generate(REQUEST, context, client.send)

        async def resume(key: str, client: Client, session_id: str) -> None:
            context = RequestContext([("authorization", f"Bearer {key}")])
            context = replace(context, tenant=await keys.authenticate(context))
            await sessions.resume(gateway_pb2.ResumeRequest(session_id=session_id), context, client.send)

        client, again = Client(), Client()
        await asyncio.create_task(generate(client))
        with pytest.raises(NotFound):
            await asyncio.create_task(resume("bob", Client(), client.session_id))
        await asyncio.create_task(resume("alice", again, client.session_id))
        assert again.tokens == client.tokens


async def test_a_key_is_read_from_headers_whatever_protocol_brought_them(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{digest("secret").hex()}" }}\n')
    keys = ApiKeys(str(file))
    await keys.authenticate(RequestContext([("authorization", "Bearer secret")], peer="ipv4:127.0.0.1:1"))
    for headers in ([], [("authorization", "Bearer secret")] * 2, [("authorization", "Bearer other")]):
        with pytest.raises(Unauthenticated):
            await keys.authenticate(RequestContext(headers, peer="ipv4:127.0.0.1:1"))
