"""Builds a verifier: the engine on its thread, scheduler, sources of candidates, and the gRPC server at one address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.engine import Engine
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.model_thread import ModelThread
from slipstream.rpc import DRAFTER, proto_conversion
from slipstream.rpc.channel import dialer
from slipstream.rpc.server import Server, role_access
from slipstream.rpc.tls import Certificates
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.telemetry.metrics_server import exposing
from slipstream.telemetry.tracing import Tracing
from slipstream.tokenizer.grammar import Grammars
from slipstream.v1 import types_pb2, worker_pb2
from verifier_svc.address_allowlist import AddressAllowlist
from verifier_svc.config import VerifierConfig
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.estimators.cost_measurement import SESSIONS
from verifier_svc.execution.executor import StepExecutor
from verifier_svc.execution.target import open_target, running_executor
from verifier_svc.rounds.observer import StepObserver
from verifier_svc.rounds.round_details import RoundDetailObserver
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.service import ServiceLimits, VerifierService
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.local_drafters import local_drafters
from verifier_svc.telemetry.metrics_source import StepStats, metrics_collector
from verifier_svc.telemetry.verifier_spans import VerifierTracing


@dataclass(frozen=True, slots=True)
class VerifierParts:
    """Parts that the configuration does not name; tests and benchmarks replace some."""

    opening: Callable[[VerifierConfig], Engine] = open_target
    """Opens the embedded engine; called on the model's thread."""
    planner: type[Planner] = Planner
    certificates: Certificates | None = None
    """None: the server uses plaintext."""
    tracing: Tracing | None = None
    """None: no spans are emitted."""


@dataclass(frozen=True, slots=True)
class VerifierServer:
    address: str
    scheduler: Scheduler
    executor: StepExecutor
    service: VerifierService
    server: Server

    @property
    def kv(self) -> KVCache:
        return self.executor.kv


@asynccontextmanager
async def running(config: VerifierConfig, parts: VerifierParts | None = None) -> AsyncIterator[VerifierServer]:
    """Serves until the block ends; running sessions then have `grace_s` to finish."""
    parts = parts or VerifierParts()
    async with (
        ModelThread(threads_for(config.threads), "target-model") as thread,
        running_executor(parts.opening, config, thread) as executor,
        _serving(config, parts, executor, thread) as verifier,
    ):
        yield verifier


@asynccontextmanager
async def _serving(
    config: VerifierConfig, parts: VerifierParts, executor: StepExecutor, thread: ModelThread
) -> AsyncIterator[VerifierServer]:
    model = proto_conversion.model_to_proto(executor.model)
    dial = dialer(DRAFTER, parts.certificates)
    sources = CandidateSources(model, config.min_path_probability, silence_s=config.silence_s, dial=dial)
    curve = CostCurve(free_candidates=config.always_speculate)
    step_tokens = config.step_tokens or executor.limits.step_tokens
    await thread.run(executor.measure_costs, curve, step_tokens, config.measure_s)
    limits = StepLimits(
        step_tokens,
        config.most_prefill_tokens(step_tokens),
        config.max_wait_s,
        executor.limits,
        config.always_speculate,
        config.prompt_step_s,
    )
    stats = StepStats()
    observers: list[StepObserver] = [stats, sources.shadows, RoundDetailObserver()]
    if parts.tracing is not None:
        observers.append(VerifierTracing(parts.tracing))
    scheduler = Scheduler(executor, thread, sources, parts.planner(sources, limits, curve), observers=observers)
    service_limits = ServiceLimits(
        model,
        config.max_sessions,
        config.most_draft_tokens,
        executor.kv.blocks_total * executor.kv.block_size,
        AddressAllowlist(config.drafters_allowed),
        executor.limits.lossy_rules,
        executor.limits.scores_prompts,
    )
    service = VerifierService(scheduler, sources, service_limits, Grammars.of(config.model, executor.model))
    served = types_pb2.ModelInfo()
    served.CopyFrom(model)  # no session may be longer than all KV memory, whatever the model reads
    served.max_length = min(model.max_length, service_limits.kv_tokens)
    worker = WorkerService(
        WorkerIdentity(served, worker_pb2.ROLE_VERIFIER), lambda: load(service), lambda: costs(curve)
    )
    server = Server([service.register, worker.register], role_access(parts.certificates))
    async with local_drafters(config, sources, executor, thread), asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(scheduler.run()), tasks.create_task(sources.run())]
        try:
            address = await server.start(config.listen, config.health_listen)
            metrics = metrics_collector(scheduler, stats, sources, service.traffic, server, parts.tracing)
            async with exposing(metrics, config.metrics_listen) as server.metrics_address:
                yield VerifierServer(address, scheduler, executor, service, server)
        finally:
            service.start_draining()
            # Once the scheduler's loop has failed, no session can finish.
            await worker.drain(server, 0.0 if loops[0].done() else config.grace_s)
            for loop in loops:
                loop.cancel()


def costs(curve: CostCurve) -> worker_pb2.CostTable:
    seconds = [second for row in curve.rows(SESSIONS) for second in row]
    return worker_pb2.CostTable(tokens=BUCKETS, sessions=SESSIONS, seconds=seconds)


def load(service: VerifierService) -> worker_pb2.WatchResponse:
    scheduler = service.scheduler
    kv = scheduler.executor.kv
    return worker_pb2.WatchResponse(
        sessions=len(scheduler),
        kv_blocks_total=kv.blocks_total,
        kv_blocks_free=kv.blocks_free,
        steps=service.progress,
        waiting=scheduler.kv_admission.refused,
        preemptions=scheduler.kv_admission.preemptions,
        prefix_tokens_sought=scheduler.kv_admission.prefix_tokens_sought,
        prefix_tokens_found=scheduler.kv_admission.prefix_tokens_found,
        drafting_paused=scheduler.pause_cause,
    )
