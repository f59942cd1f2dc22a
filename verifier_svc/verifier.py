"""A verifier put together: an engine on its own thread, the loop, the drafters' links, the services, one address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.engine import Engine
from slipstream.engine.model_thread import ModelThread
from slipstream.engine.tensor_parallel.group import leading
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import dialer
from slipstream.rpc.server import DRAFTER, Server, role_access
from slipstream.rpc.tls import Certificates
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.telemetry.metrics_server import exposing
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.grammar import Grammars
from slipstream.v1 import worker_pb2
from verifier_svc.config import VerifierConfig
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.estimators.cost_measurement import measure
from verifier_svc.execution.target import open_target
from verifier_svc.metrics_source import meter
from verifier_svc.scheduling.planner import Planner, StepLimits
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.service import ServiceLimits, VerifierService
from verifier_svc.sources.address_allowlist import AddressAllowlist
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.local import local_drafters


@dataclass(frozen=True, slots=True)
class VerifierParts:
    """What tests and benchmarks replace, and what the configuration does not hold."""

    opening: Callable[[VerifierConfig], Engine] = open_target
    """Runs on the model's thread."""
    planner: type[Planner] = Planner
    certificates: Certificates | None = None
    """None: plaintext."""
    tracing: Tracing | None = None
    """None: nothing is traced."""


@dataclass(frozen=True, slots=True)
class VerifierServer:
    """A running verifier."""

    address: str
    scheduler: Scheduler
    engine: Engine
    service: VerifierService
    server: Server


@asynccontextmanager
async def running(config: VerifierConfig, parts: VerifierParts | None = None) -> AsyncIterator[VerifierServer]:
    """A verifier that listens; at the end its sessions have `grace_s` to finish."""
    parts = parts or VerifierParts()
    async with ModelThread(threads_for(config.threads), "target-model") as thread:
        engine = await thread.run(parts.opening, config)
        async with leading(engine, thread, config.group_timeout_s), _serving(config, parts, engine, thread) as verifier:
            yield verifier


@asynccontextmanager
async def _serving(
    config: VerifierConfig, parts: VerifierParts, engine: Engine, thread: ModelThread
) -> AsyncIterator[VerifierServer]:
    model = proto_conversion.model_to_proto(engine.model)
    dial = dialer(DRAFTER, parts.certificates)
    drafters = CandidateSources(model, config.min_path_probability, silence_s=config.silence_s, dial=dial)
    curve = CostCurve()
    await thread.run(measure, curve, engine, config.step_tokens, config.measure_s)
    limits = StepLimits(config.step_tokens, config.prefill_tokens, config.max_wait_s)
    scheduler = Scheduler(engine, thread, drafters, parts.planner(drafters, limits, curve))
    scheduler.tracing = parts.tracing
    bounds = ServiceLimits(
        model,
        config.max_sessions,
        config.max_draft_tokens,
        engine.blocks_total * engine.block_size,
        AddressAllowlist(config.drafters_allowed),
        parts.tracing,
    )
    service = VerifierService(scheduler, drafters, bounds, Grammars.of(config.model, engine.model))
    worker = WorkerService(WorkerIdentity(model, worker_pb2.ROLE_VERIFIER), lambda: load(scheduler, engine))
    server = Server([service.register, worker.register], role_access(parts.certificates))
    async with local_drafters(config, drafters), asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(scheduler.run()), tasks.create_task(drafters.run())]
        try:
            address = await server.start(config.listen, config.health_listen)
            metrics = meter(scheduler, engine, drafters, service.traffic, server, parts.tracing)
            async with exposing(metrics, config.metrics_listen) as server.metrics_address:
                yield VerifierServer(address, scheduler, engine, service, server)
        finally:
            service.leave()
            # Where the loop has failed nobody finishes any more.
            await worker.drain(server, 0.0 if loops[0].done() else config.grace_s)
            for loop in loops:
                loop.cancel()


def load(scheduler: Scheduler, engine: Engine) -> worker_pb2.WatchResponse:
    return worker_pb2.WatchResponse(
        sessions=len(scheduler),
        kv_blocks_total=engine.blocks_total,
        kv_blocks_free=engine.blocks_free,
        steps=scheduler.steps,
        waiting=scheduler.memory.waiting,
        preemptions=scheduler.memory.preemptions,
        prefix_tokens_sought=scheduler.memory.tokens_sought,
        prefix_tokens_found=scheduler.memory.tokens_found,
    )
