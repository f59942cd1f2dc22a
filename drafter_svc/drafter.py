"""A drafter put together: a proposer on its own thread, the drafting loop, the services, one address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from drafter_svc.config import DrafterConfig
from drafter_svc.metrics_source import DraftStepStats, collect_metrics
from drafter_svc.service import DrafterLimits, DrafterService
from slipstream.engine.cpu_cores import threads_for
from slipstream.engine.model_thread import ModelThread
from slipstream.proposers.base import OpenedProposer, open_proposer
from slipstream.proposers.drafting.scheduler import DraftScheduler
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.proposers.expansion import FEWEST, measured_expansion
from slipstream.proposers.registry import find_method
from slipstream.rpc import proto_conversion
from slipstream.rpc.server import Server, role_access
from slipstream.rpc.tls import Certificates
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.telemetry.metrics_server import exposing
from slipstream.telemetry.tracing import Tracing
from slipstream.v1 import worker_pb2

log = logging.getLogger(__name__)

ProposerFactory = Callable[[DrafterConfig], OpenedProposer]


@dataclass(frozen=True, slots=True)
class DrafterServer:
    """A running drafter."""

    address: str
    scheduler: DraftScheduler
    server: Server


def open_configured(config: DrafterConfig) -> OpenedProposer:
    """The proposer that the configuration names; raises what `open_proposer` raises."""
    return open_proposer(config.method, config.proposer_settings())


@asynccontextmanager
async def running(
    config: DrafterConfig,
    factory: ProposerFactory = open_configured,
    certificates: Certificates | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[DrafterServer]:
    """A drafter that listens; `factory` runs on the model's thread. At the end sessions have `grace_s` to finish."""
    method = find_method(config.method)
    threads = threads_for(config.threads)
    async with ModelThread(threads if method.needs_model else 0, "draft-model") as thread:
        opened = await thread.run(factory, config)
        expand = min(config.expand or FEWEST, opened.expands)
        if not config.expand and method.needs_model and opened.expands > FEWEST:
            expand = await thread.run(measured_expansion, opened.proposer)
            log.info("a pass expands %d nodes of a session (DRAFTER_EXPAND)", expand)
        scheduler = DraftScheduler(opened.proposer, DraftStepLimits(config.step_tokens, expand))
        scheduler.observer = stats = DraftStepStats()
        model = proto_conversion.model_to_proto(opened.model)
        bounds = DrafterLimits(model, config.max_sessions, config.max_nodes, method.gives_distribution, tracing)
        service = DrafterService(scheduler, bounds)
        worker = WorkerService(WorkerIdentity(model, worker_pb2.ROLE_DRAFTER, config.method), service.load)
        server = Server([service.register, worker.register], role_access(certificates))
        async with asyncio.TaskGroup() as tasks:
            drafting = tasks.create_task(scheduler.run(thread))
            try:
                address = await server.start(config.listen, config.health_listen)
                metrics = collect_metrics(model, scheduler, stats, service.traffic, server, tracing)
                async with exposing(metrics, config.metrics_listen) as server.metrics_address:
                    yield DrafterServer(address, scheduler, server)
            finally:
                await worker.drain(server, config.grace_s)
                drafting.cancel()
