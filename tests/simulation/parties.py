"""The real services put together over the simulated network: as each role's own bootstrap does, but for the clock, the
model's thread, channels, servers and the store."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capacity.clock import VirtualThread
from capacity.workers import curve_of
from drafter_svc import service as drafter_service
from gateway import configured_workers as gateway_workers
from gateway.api.grpc_service import GatewayService
from gateway.config import GatewayConfig
from gateway.gateway import drain, flush
from gateway.sessions.registry import SessionRegistry
from gateway.sessions.run import GatewayContext
from gateway.store.write_behind import WriteBehindQueue
from gateway.text.tokenizer import Tokenizer
from slipstream.engine.emulated.model import EmulatedModel, LinearCost
from slipstream.engine.engine import EngineLost
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.errors import Unavailable
from slipstream.proposers.drafting.scheduler import DraftScheduler as DraftScheduler
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.rpc import proto_conversion
from slipstream.rpc.channel import Dial
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.rpc.worker_service import WorkerIdentity, WorkerService
from slipstream.tokenizer.grammar import Grammars
from slipstream.tokenizer.vocabulary import load_tokenizer
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, worker_pb2
from tests.simulation.chained import VOCABULARY, ChainedEngine
from tests.simulation.clock import Party
from tests.simulation.dialling import Channel, address_of
from tests.simulation.faulty import FaultyEngine
from tests.simulation.network import Network
from tests.simulation.proposer import Recall
from tests.simulation.serving import Host
from tests.simulation.store import LEASE_S, Client, Server
from tests.support.hostile_drafter import HostileDrafter, frame, refusal
from verifier_svc import service as verifier_service
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.verifier import load

BLOCKS, BLOCK_SIZE = 48, 4
"""So few that sessions have to take turns now and then."""
TARGET_S, DRAFT_S = 0.02, 0.008
GRACE_S = 3.0
"""For what runs, when a party is to end."""
TARGET = LinearCost(TARGET_S, 0.001, 0.0, 16)
MODEL = EmulatedModel(vocabulary_size=VOCABULARY)
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "target"


@functools.cache
def tokenizer() -> Tokenizer:
    """Nothing in it belongs to a session."""
    return Tokenizer(load_tokenizer(str(TOKENIZER)), 1 << 16)


def drafted_target() -> ChainedEngine:
    return ChainedEngine(MODEL, TARGET, BlockPool(1, BLOCK_SIZE), lambda: 0.0)


Drain = Callable[[], Coroutine[Any, Any, None]]
"""What a role does on SIGTERM before it ends."""


@dataclass(frozen=True, slots=True)
class VerifierParty:
    party: Party
    drain: Drain
    scheduler: Scheduler
    service: verifier_service.VerifierService
    engine: FaultyEngine
    decoding: asyncio.Task[None]
    """Its end is the process's."""


@dataclass(frozen=True, slots=True)
class DrafterParty:
    party: Party
    drain: Drain
    scheduler: DraftScheduler | None
    """None: hostile, with no session of its own."""


@dataclass(frozen=True, slots=True)
class GatewayParty:
    party: Party
    drain: Drain
    sessions: SessionRegistry
    write_behind: WriteBehindQueue | None
    """None: strict."""


def arithmetic_named(number: int) -> str:
    return f"arithmetic-{number}"


def arithmetic_numbered(name: str) -> int:
    return int(name.removeprefix("arithmetic-"))


def verifier(network: Network, name: str, poisons: Mapping[int, int], arithmetic: int | None = None) -> VerifierParty:
    """`arithmetic`: number of what decides its texts; None: there is one, which has no name."""
    party = Party(name)
    return party.context.run(_verifier, network, party, poisons, arithmetic)


def _verifier(network: Network, party: Party, poisons: Mapping[int, int], arithmetic: int | None) -> VerifierParty:
    clock, thread = network.loop.time, VirtualThread()
    pool = BlockPool(BLOCKS, BLOCK_SIZE)
    engine = FaultyEngine(network.chance, poisons, MODEL, TARGET, pool, lambda: 0.0, thread.sleep)
    model = proto_conversion.model_to_proto(engine.model)
    if arithmetic is not None:
        engine.arithmetic, model.arithmetic = arithmetic, arithmetic_named(arithmetic)
    drafters = CandidateSources(model, 0.02, clock, silence_s=0.5, dial=lambda address: Channel(network, address))  # type: ignore[arg-type, return-value]
    planner = Planner(drafters, StepLimits(64, 32, 0.1), curve_of(TARGET), clock)
    executor, observers = EmbeddedExecutor(engine), [drafters.shadows]
    scheduler = Scheduler(executor, thread, drafters, planner, clock, observers)  # type: ignore[arg-type]
    bounds = verifier_service.ServiceLimits(model, 64, 8, BLOCKS * BLOCK_SIZE)
    service = verifier_service.VerifierService(scheduler, drafters, bounds, Grammars.of("", engine.model))
    worker = WorkerService(
        WorkerIdentity(model, worker_pb2.ROLE_VERIFIER, started_ms=_started(network)), lambda: load(service)
    )
    host = Host(network, party, party.name, [service.register, worker.register])
    decoding = party.spawn(scheduler.run())
    decoding.add_done_callback(_expect_loss)
    party.spawn(drafters.run())

    async def drain() -> None:
        service.start_draining()
        await worker.drain(host, GRACE_S)  # type: ignore[arg-type]

    return VerifierParty(party, drain, scheduler, service, engine, decoding)


def _started(network: Network) -> int:
    """Milliseconds, by the simulation's clock: runs of one seed send the same bytes."""
    return int(1e3 * network.loop.time())


def _expect_loss(decoding: asyncio.Task[None]) -> None:
    if not decoding.cancelled() and (error := decoding.exception()) and not isinstance(error, EngineLost):
        raise error


def drafter(network: Network, name: str) -> DrafterParty:
    party = Party(name)
    return party.context.run(_drafter, network, party)


def _drafter(network: Network, party: Party) -> DrafterParty:
    thread = VirtualThread()
    scheduler = DraftScheduler(Recall(DRAFT_S, thread.sleep), DraftStepLimits(64, 4), network.loop.time)
    model = proto_conversion.model_to_proto(drafted_target().model)
    service = drafter_service.DrafterService(
        scheduler, drafter_service.DrafterLimits(model, 64, 64, gives_distribution=False)
    )
    worker = WorkerService(WorkerIdentity(model, worker_pb2.ROLE_DRAFTER, "model", _started(network)), service.load)
    host = Host(network, party, party.name, [service.register, worker.register])
    party.spawn(scheduler.run(thread))  # type: ignore[arg-type]
    return DrafterParty(party, lambda: worker.drain(host, GRACE_S), scheduler)  # type: ignore[arg-type]


def hostile(network: Network, name: str) -> DrafterParty:
    """Reports the role of a drafter, and sends anything."""
    party = Party(name)
    return party.context.run(_hostile, network, party)


def _hostile(network: Network, party: Party) -> DrafterParty:
    liar = HostileDrafter(lambda _, command: lies(network.chance, command))
    model = proto_conversion.model_to_proto(drafted_target().model)
    worker = WorkerService(
        WorkerIdentity(model, worker_pb2.ROLE_DRAFTER, "index", _started(network)), worker_pb2.WatchResponse
    )
    register = functools.partial(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, liar)
    host = Host(network, party, party.name, [register, worker.register])
    return DrafterParty(party, lambda: worker.drain(host, GRACE_S), None)  # type: ignore[arg-type]


def lies(chance: random.Random, command: drafter_pb2.DraftCommand) -> list[drafter_pb2.DraftResponse | Exception]:
    """Mostly well-formed guesses that are wrong; now and then what no drafter may send."""
    if command.WhichOneof("command") not in ("open", "commit"):
        return []
    tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 4))]
    choice = chance.random()
    if choice < 0.85:
        return [frame(command, tokens)]
    wrong: list[drafter_pb2.DraftResponse | Exception] = [
        frame(command, [*tokens, VOCABULARY + chance.randrange(9)]),
        frame(command, tokens, base_length=chance.randrange(1 << 20)),
        frame(command, tokens, generation=chance.randrange(1 << 20)),
        frame(command, tokens, epoch=command.epoch + 1),
        frame(command, tokens, session=command.session + chance.randrange(3)),
        frame(command, tokens, parents=[chance.randrange(99) for _ in tokens]),
        frame(command, tokens, first_node=chance.randrange(1 << 20)),
        refusal(command, chance.randrange(1, 17)),
        Unavailable("enough of this stream"),
    ]
    return [chance.choice(wrong)] if choice < 0.99 else wrong[:-1] * 20


Workers = tuple[list[str], list[str]]
"""Names of verifiers and of drafters."""


def gateway(network: Network, name: str, store: Server, workers: Workers, *, relaxed: bool) -> GatewayParty:
    party = Party(name)
    return party.context.run(_gateway, network, party, store, workers, relaxed)


def _gateway(network: Network, party: Party, store: Server, workers: Workers, relaxed: bool) -> GatewayParty:
    bits = network.chance.getrandbits
    config = GatewayConfig(
        verifiers=tuple(workers[0]),
        tokenizer=str(TOKENIZER),
        drafters=tuple(f"{name}={address_of(name)}" for name in workers[1]),
        lease_s=LEASE_S,
        durability="relaxed" if relaxed else "strict",
        store_grace_s=2.0,
        credit_tokens=16,
        rehoming_wait_s=2.0,
        stall_s=1.0,
        breaker_window_s=5.0,
        breaker_longest_cool_down_s=5.0,
    )
    client = Client(store, party, f"{bits(64):016x}")

    def dial_for(role: str) -> Dial:
        return lambda address: Channel(network, address)  # type: ignore[return-value]

    known = gateway_workers.ConfiguredWorkers(config, tokenizer().fingerprint, dial_for, ByteCounter())
    router = known.router(network.loop.time)
    context = GatewayContext(config, router, bits, network.loop.time)
    write_behind = WriteBehindQueue() if relaxed else None
    sessions = SessionRegistry(context, tokenizer(), client, write_behind)
    host = Host(network, party, party.name, [GatewayService(sessions, router, tokenizer()).register])
    for worker in router.workers:
        party.spawn(worker.run())
    party.spawn(sessions.keep_leases())
    if write_behind is not None:
        party.spawn(write_behind.run())

    async def end() -> None:
        await drain(host, sessions, GRACE_S)  # type: ignore[arg-type]
        await flush(write_behind, config.store_grace_s)

    return GatewayParty(party, end, sessions, write_behind)
