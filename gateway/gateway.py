"""The gateway as one process: its parts put together, started and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gateway.api.grpc_service import GatewayService, ReceivedRequests, authenticating
from gateway.auth.api_keys import ApiKeys
from gateway.config import BESIDES_BYTES, BODY_FACTOR, GatewayConfig
from gateway.configured_workers import ConfiguredWorkers
from gateway.requests.sampling_defaults import read_sampling_defaults
from gateway.requests.validation import RandomBits
from gateway.routing.discovery import Resolve, resolve
from gateway.routing.router import Router
from gateway.sessions.ownership import owner_of
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.run import GatewayContext
from gateway.store.measured import MeasuredStore
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.quota import SharedQuota
from gateway.store.session_store import SessionStore
from gateway.store.write_behind import WriteBehindQueue
from gateway.telemetry.experiment_samples import ExperimentSamples
from gateway.telemetry.metrics_source import MetricsParts, metrics_collector
from gateway.telemetry.observers import GatewayObservers
from gateway.telemetry.request_metrics import Objectives, RequestMetrics
from gateway.text.tokenizer import Tokenizer
from gateway.text.worker import setup_of
from gateway.work.processes import ProcessSource
from gateway.work.tenant_work import TenantWork
from slipstream.errors import Unavailable
from slipstream.process import COLLECT_OFTEN, return_memory, tune_runtime, until_signal
from slipstream.rpc.channel import MAX_MESSAGE_BYTES, dialer
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.server import AccessControl, Server
from slipstream.rpc.tls import Certificates, certificates_from_env, server_credentials
from slipstream.telemetry.metrics_collector import MetricsCollector
from slipstream.telemetry.metrics_server import exposing
from slipstream.telemetry.span_exporters import tracing_from_env
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.chat_template_source import load_chat_template
from slipstream.tokenizer.special_tokens import load_special_tokens
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import types_pb2

if TYPE_CHECKING:
    from gateway.api.http.server import HttpServer

OFF = "off"
CONNECTION_AGE_MS = 30 * 60 * 1000
REFUSED_BYTES = 1 << 20
"""Above the largest request, in which one is read to be refused with a reason."""

log = logging.getLogger(__name__)

FAREWELL_S = 1.0
"""Seconds for the last messages to clients, when a gateway ends."""
LOOK_S = 0.05
"""Seconds between two looks at what is left of the sessions of a gateway that ends."""


@dataclass(frozen=True, slots=True)
class GatewayDependencies:
    """Dependencies outside the process, which tests replace."""

    random_bits: RandomBits
    certificates: Certificates | None = None
    """None: plaintext to the workers."""
    store: SessionStore | None = None
    """None: the one that the configuration names."""
    resolve: Resolve = resolve
    tracing: Tracing | None = None
    """None: nothing is traced."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class GatewayServer:
    """A running gateway."""

    address: str
    router: Router
    sessions: SessionRegistry
    server: Server
    tokenizer: Tokenizer
    metrics: RequestMetrics
    samples: ExperimentSamples | None
    store: MeasuredStore
    config: GatewayConfig
    work: TenantWork

    async def ready(self) -> None:
        """Wait until the store has answered and a verifier can serve, then let health checks succeed. Raises
        FailedPrecondition for a store that `store_eviction` refuses."""
        if self.config.store_eviction == "refuse":
            await self.store.require_no_eviction()
        await self.store.answered.wait()
        while not self.router.ready:
            await self.router.changes.wait()
        for model in [verifier.model for verifier in self.router.verifiers if verifier.model is not None]:
            await self.tokenizer.prepare(model)
        await self.server.set_serving(True)


@asynccontextmanager
async def running(config: GatewayConfig, outside: GatewayDependencies) -> AsyncIterator[GatewayServer]:
    """A gateway that listens; at the end its running sessions have `grace_s` to finish, and are let go then."""
    async with AsyncExitStack() as stack:
        tokenizer, work = await _open_texts(config, outside, stack)
        store, quota = _open_store(config, outside)
        stack.push_async_callback(store.close)
        metrics, traffic = _request_metrics(config), ByteCounter()
        experiment = config.parsed_experiment()
        dial_for = partial(dialer, certificates=outside.certificates)
        workers = ConfiguredWorkers(
            config, tokenizer.fingerprint, dial_for, traffic, metrics.drafter_failed, experiment
        )
        router = workers.router(outside.clock)
        for worker in router.workers:
            stack.push_async_callback(worker.close)
        write_behind = WriteBehindQueue(outside.clock) if config.durability == "relaxed" else None
        samples = None if experiment is None else ExperimentSamples(experiment)
        observers = GatewayObservers(metrics, outside.tracing, samples)
        context = GatewayContext(
            config, router, outside.random_bits, outside.clock, observers, _sampling_defaults(config)
        )
        sessions = SessionRegistry(context, tokenizer, store, write_behind)
        service = GatewayService(sessions, router, tokenizer, samples, store)
        keys = _open_keys(config, outside, quota)
        server = _grpc_server(config, service, _access(config, outside, keys))
        parts = MetricsParts(config, metrics, router, store, write_behind, traffic, server, work, outside.tracing)
        collector = metrics_collector(parts)
        server.metrics_address = await stack.enter_async_context(exposing(collector, config.metrics_listen))
        http = _http_server(config, outside, keys, (sessions, router, tokenizer, collector, server, work, store))
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(worker.run()) for worker in router.workers]
            loops += [tasks.create_task(each.run(outside.resolve, config.discovery_s)) for each in router.discoveries]
            loops.append(tasks.create_task(sessions.keep_leases()))
            loops.append(tasks.create_task(store.watch()))
            loops += [tasks.create_task(keys.report(config.renewal_s))] if keys is not None else []
            if write_behind is not None:
                loops.append(tasks.create_task(write_behind.run()))
            try:
                address = await server.start(config.listen, config.health_listen)
                server.http_address = "" if http is None else await http.start(config.http)
                yield GatewayServer(address, router, sessions, server, tokenizer, metrics, samples, store, config, work)
            finally:
                await drain(server, sessions, config.grace_s, http)
                await flush(write_behind, config.store_grace_s)
                for loop in loops:
                    loop.cancel()


def _sampling_defaults(config: GatewayConfig) -> types_pb2.SamplingOptions:
    if config.generation_config == "none":
        return types_pb2.SamplingOptions()
    found = read_sampling_defaults(config.tokenizer)
    if named := ", ".join(f"{field.name} {value:g}" for field, value in found.ListFields()):
        log.info("requests that set no sampling parameters get the model's: %s", named)
    return found


async def serve(config: GatewayConfig) -> None:
    """Run a gateway until SIGTERM or SIGINT; print a line on standard output when it can serve."""
    return_memory()
    certificates = certificates_from_env()
    async with (
        tracing_from_env("slipstream-gateway") as tracing,
        running(config, GatewayDependencies(secrets.randbits, certificates=certificates, tracing=tracing)) as gateway,
        asyncio.TaskGroup() as tasks,
    ):
        ready = tasks.create_task(_announce(gateway))
        tune_runtime(COLLECT_OFTEN)
        await until_signal()
        ready.cancel()


async def check(config: GatewayConfig) -> None:
    """Raises the SlipstreamError for which a gateway with this configuration would not start, such as an address that
    another process has. Loads nothing."""
    server = Server([])
    await server.start(config.listen, config.health_listen)
    await server.stop(0.0)
    if config.http != OFF:
        from gateway.api.http.server import bind

        bind(config.http).close()


async def _announce(gateway: GatewayServer) -> None:
    await asyncio.gather(gateway.work.prepare(), gateway.ready())
    log.info("%s", gateway.server.announcement)
    print(gateway.server.announcement, flush=True)


def _http_server(
    config: GatewayConfig,
    outside: GatewayDependencies,
    keys: ApiKeys | None,
    shared: tuple[SessionRegistry, Router, Tokenizer, MetricsCollector, Server, TenantWork, MeasuredStore],
) -> HttpServer | None:
    if config.http == OFF:
        return None
    # Imported here: a gateway without HTTP starts without its libraries.
    from gateway.api.http.dependencies import HttpDependencies
    from gateway.api.http_front import http_server

    return http_server(HttpDependencies(config, *shared), keys, _client_certificates(config, outside))


def _client_certificates(config: GatewayConfig, outside: GatewayDependencies) -> Certificates | None:
    """Certificates that clients see: the folder's, or else the certificate that the gateway shows to other services."""
    return Certificates(config.tls_folder, authorities=False) if config.tls_folder else outside.certificates


async def _open_texts(
    config: GatewayConfig, outside: GatewayDependencies, stack: AsyncExitStack
) -> tuple[Tokenizer, TenantWork]:
    """The tokenizer, and what encodes long texts with it until the stack ends."""

    def load() -> Tokenizer:
        template = load_chat_template(config.tokenizer, config.chat_template)
        special = load_special_tokens(config.tokenizer)
        return Tokenizer(load_tokenizer(config.tokenizer), config.max_prompt_bytes, template, special_tokens=special)

    tokenizer = await asyncio.to_thread(load)
    source = ProcessSource("gateway.text.worker", lambda: setup_of(tokenizer.encoding))
    most_bytes = 2 * (BODY_FACTOR * 2 * config.max_prompt_bytes + BESIDES_BYTES)
    work = tokenizer.work = TenantWork(source, config.text_processes, most_bytes, outside.clock)
    stack.push_async_callback(work.close)
    return tokenizer, work


def _open_keys(config: GatewayConfig, outside: GatewayDependencies, quota: SharedQuota | None) -> ApiKeys | None:
    """One object for all protocols: they share each key's limits."""
    if not config.api_keys:
        return None
    return ApiKeys(config.api_keys, config.failed_keys_per_minute, outside.clock, quota)


def _open_store(config: GatewayConfig, outside: GatewayDependencies) -> tuple[MeasuredStore, SharedQuota | None]:
    """The store, and what counts API keys' use for all gateways that share it."""
    if outside.store is not None:
        return MeasuredStore(outside.store, outside.clock, config.store_grace_s), None
    store, quota = _open_configured_store(config, outside)
    kind = config.store.partition(":")[0]
    return MeasuredStore(store, outside.clock, config.store_grace_s, kind), quota


def _open_configured_store(
    config: GatewayConfig, outside: GatewayDependencies
) -> tuple[SessionStore, SharedQuota | None]:
    owner = f"{outside.random_bits(64):016x}"
    if config.store == "memory":
        memory = MemoryBackend(outside.clock, config.memory_store_bytes, owner_of)
        return MemoryStore(memory, owner=owner, ttl_s=config.session_ttl_s, lease_s=config.lease_s), None
    # Imported here: on one machine without Redis its client is not needed.
    from gateway.store.redis import RedisQuota, RedisStore, connect

    client = connect(config.store, sentinel_password=config.store_sentinel_password)
    times = {"ttl_s": config.session_ttl_s, "lease_s": config.lease_s}
    store = RedisStore(client, owner=owner, replicas=config.store_replicas, **times)
    return store, RedisQuota(client, gateway=owner, lease_s=config.lease_s, clock=outside.clock)


def _access(config: GatewayConfig, outside: GatewayDependencies, keys: ApiKeys | None) -> AccessControl:
    """Clients have keys, no certificates. The server's own certificate is the folder's, or else the one that it shows
    to other services."""
    certificates = _client_certificates(config, outside)
    credentials = server_credentials(certificates, ask_clients=False) if certificates is not None else None
    if keys is None:
        log.warning("GATEWAY_API_KEYS is not set: every client that reaches %s may use this gateway", config.listen)
        return AccessControl(credentials)
    if credentials is None:
        log.warning("API keys come in plaintext to %s: set GATEWAY_TLS_FOLDER where others can listen", config.listen)
    return AccessControl(credentials, authenticating(keys))


def _grpc_server(config: GatewayConfig, service: GatewayService, access: AccessControl) -> Server:
    """The port for clients. An old connection is closed once its streams have ended, so that clients spread over new
    gateways."""
    most = min(MAX_MESSAGE_BYTES, 2 * config.max_prompt_bytes + BESIDES_BYTES)  # a prompt and a prediction
    options = {
        # Above its limit a request is refused with what the limit is; far above it by gRPC, which then reads nothing.
        "grpc.max_receive_message_length": most + REFUSED_BYTES,
        "grpc.max_connection_age_ms": CONNECTION_AGE_MS,
        # Else a quick connection may send megabytes of each call before anything of it is read.
        "grpc.http2.bdp_probe": 0,
    }
    return Server([service.register], access, options, most, service.read, ReceivedRequests())


def _request_metrics(config: GatewayConfig) -> RequestMetrics:
    objectives = Objectives(config.slo_ttft_s, config.slo_tpot_s, config.slow_request_s)
    return RequestMetrics(objectives, config.metric_workloads)


async def drain(server: Server, sessions: SessionRegistry, grace_s: float, http: HttpServer | None = None) -> None:
    """Give sessions `grace_s` to finish, whatever protocol their clients came by, unless none can: without a verifier.
    The others are released, and their clients receive an error that asks them to resume."""
    log.info("draining: sessions have %g s to finish", grace_s)
    stopping = asyncio.create_task(_stop_servers(server, http, grace_s + FAREWELL_S))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while not (sessions.stuck or (stopping.done() and sessions.deserted)):
                await asyncio.sleep(LOOK_S)
    await sessions.close()
    await stopping


async def _stop_servers(server: Server, http: HttpServer | None, grace_s: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.stop(grace_s))
        if http is not None:
            tasks.create_task(http.stop(grace_s))


async def flush(write_behind: WriteBehindQueue | None, grace_s: float) -> None:
    """Give writes that relaxed sessions left behind up to `grace_s` to be carried out."""
    if write_behind is None:
        return
    try:
        await write_behind.written(grace_s)
    except Unavailable:
        log.error("the session store is away; the last tokens of relaxed sessions are not in it")
