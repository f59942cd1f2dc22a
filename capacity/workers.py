"""A verifier's and a drafter's own code on virtual time, put together as each role's bootstrap does, but for the clock,
the model's thread and the stream between them: a pass takes exactly what its engine says, a frame arrives exactly
`delay_s` later, and Python costs nothing.

All functions must be called on a `capacity.clock.VirtualLoop` that runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from capacity.clock import VirtualThread
from capacity.cost import Cost
from drafter_svc import service as drafter_service
from drafter_svc.metrics_source import DraftStepStats
from slipstream.engine.model_info import ModelInfo
from slipstream.proposers.base import Proposer
from slipstream.proposers.drafting.scheduler import DraftScheduler
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.grammar import Grammars
from slipstream.v1 import drafter_pb2
from verifier_svc import service as verifier_service
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.estimators.cost_measurement import SESSIONS
from verifier_svc.execution.executor import StepExecutor
from verifier_svc.rounds.observer import StepObserver
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.drafter_link import DrafterLink
from verifier_svc.wait_policy.draft_threshold import LEVELS

MANY = 1 << 20
"""More sessions and candidates than are ever asked for."""


def curve_of(cost: Cost) -> CostCurve:
    """Costs that a verifier knows when it has measured them."""
    curve = CostCurve()
    for size in BUCKETS:
        for sessions in SESSIONS:
            if sessions <= size:
                curve.record(size, sessions, [cost(size, sessions)])
    return curve


@dataclass(frozen=True, slots=True)
class Drafter:
    scheduler: DraftScheduler
    limits: drafter_service.DrafterLimits
    stats: DraftStepStats
    running: asyncio.Task[None]


def start_drafter(
    proposer: Proposer, model: ModelInfo, limits: DraftStepLimits, max_nodes: int, thread: VirtualThread
) -> Drafter:
    loop = asyncio.get_running_loop()
    scheduler = DraftScheduler(proposer, limits, loop.time)
    scheduler.observer = stats = DraftStepStats()
    bounds = drafter_service.DrafterLimits(proto_conversion.model_to_proto(model), MANY, max_nodes)
    return Drafter(scheduler, bounds, stats, loop.create_task(scheduler.run(thread)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class VirtualVerifierParts:
    limits: StepLimits
    min_path_probability: float = LEVELS[0]
    planner: type[Planner] = Planner
    observers: list[StepObserver] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verifier:
    service: verifier_service.VerifierService
    scheduler: Scheduler
    sources: CandidateSources
    running: asyncio.Task[None]


def start_verifier(
    executor: StepExecutor, curve: CostCurve, thread: VirtualThread, parts: VirtualVerifierParts
) -> Verifier:
    """`executor` computes on `thread`."""
    loop = asyncio.get_running_loop()
    model = proto_conversion.model_to_proto(executor.model)
    sources = CandidateSources(model, parts.min_path_probability, loop.time, dial=lambda _: _NoChannel())  # type: ignore[arg-type, return-value]
    planner = parts.planner(sources, replace(parts.limits, executor=executor.limits), curve, loop.time)
    observers = [*parts.observers, sources.shadows]
    scheduler = Scheduler(executor, thread, sources, planner, loop.time, observers)  # type: ignore[arg-type]
    bounds = verifier_service.ServiceLimits(model, MANY, MANY, executor.kv.blocks_total * executor.kv.block_size)
    service = verifier_service.VerifierService(scheduler, sources, bounds, Grammars.of("", executor.model))
    return Verifier(service, scheduler, sources, loop.create_task(scheduler.run()))


class _NoChannel:
    """`connect` puts a link in the place of the stream that would use one."""

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda *_, **__: None


def connect(sources: CandidateSources, drafter: Drafter, address: str, delay_s: float) -> VirtualLink:
    """A verifier reaches the drafter under this address, with so many seconds one way."""
    listener = sources._link(address, [])
    link = VirtualLink(drafter_service.VerifierStream(drafter.scheduler, drafter.limits), listener, delay_s)
    listener._link = link  # type: ignore[assignment]
    return link


class VirtualLink:
    """For `MultiplexedStream`: a verifier's messages arrive at one drafter's stream, and the other way round, late."""

    def __init__(self, peer: drafter_service.VerifierStream, listener: DrafterLink, delay_s: float) -> None:
        self.up = True
        self.bytes = 0
        self._outbox = peer.outbox
        self._there, self._back = _Line(delay_s, peer.receive), _Line(delay_s, listener.receive)
        self.running = asyncio.get_running_loop().create_task(self._run())

    def send(self, command: drafter_pb2.DraftCommand) -> None:
        self._there.send(drafter_pb2.DraftRequest(commands=[command]))

    async def _run(self) -> None:
        while items := await self._outbox.take():
            frame = drafter_service.pack(items)
            self.bytes += frame.ByteSize()
            self._back.send(frame)


class _Line:
    """One direction. What was sent first arrives first: timers of one moment go off in any order, a stream's frames do
    not."""

    def __init__(self, delay_s: float, receive: Callable[[Any], None]) -> None:
        self._delay_s = delay_s
        self._receive = receive
        self._under_way: deque[Any] = deque()

    def send(self, frame: Any) -> None:
        self._under_way.append(frame)
        asyncio.get_running_loop().call_later(self._delay_s, self._arrive)

    def _arrive(self) -> None:
        self._receive(self._under_way.popleft())
