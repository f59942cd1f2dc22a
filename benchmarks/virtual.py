"""The real drafter, verifier and planner on a virtual clock: what the policies are worth, without the machine's noise.

Both are the system's own code (`capacity.workers`) on emulated engines, which have a text. Figures are exact,
repeatable to the last digit, and take no time: an upper bound that the measured system is to be held against.

usage: python -m benchmarks.virtual     (tokens a second by one-way delay; a target of 20 ms, a drafter of 2 ms a pass,
with 4 nodes a draft pass, as on CPUs, with 16, as drafters choose on GPUs, and wide: with
VERIFIER_MIN_PATH_PROBABILITY=0.01 too)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from benchmarks.records import Row, write
from capacity.clock import VirtualThread, run
from capacity.workers import VirtualLink, VirtualVerifierParts, connect, curve_of, start_drafter, start_verifier
from drafter_svc.metrics_source import DraftStepStats
from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.emulated.model import EmulatedModel, LinearCost
from slipstream.engine.engine import Engine
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.drafting.scheduler import DraftScheduler
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.v1 import types_pb2, verifier_pb2
from verifier_svc import service as verifier_service
from verifier_svc.config import PROMPT_STEP_S
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import StepExecutor
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.telemetry.metrics_source import StepStats
from verifier_svc.wait_policy.draft_threshold import LEVELS

VOCABULARY = 512
BLOCKS, BLOCK_SIZE = 1 << 15, 32
DELAYS_MS = (0, 1, 2, 5, 6, 10, 20, 50)
ADDRESS = verifier_pb2.DrafterAddress(address="drafter:1", name="model")


@dataclass(frozen=True, slots=True)
class World:
    """What is emulated. Seconds."""

    delay_s: float = 0.0
    """One way between drafter and verifier."""
    target: LinearCost = field(default_factory=lambda: LinearCost(0.020, 0.001, 0.0, 16))
    draft: LinearCost = field(default_factory=lambda: LinearCost(0.002))
    acceptance: float = 0.8
    fanout: float = 0.7
    width: int = 4
    expand: int = 4
    max_nodes: int = 128
    min_path_probability: float = LEVELS[0]
    planner: type[Planner] = Planner
    executor: Callable[[Engine], StepExecutor] = EmbeddedExecutor
    blocks: int = BLOCKS
    """KV of the target."""
    one_core: bool = False
    """Drafter and target compute in turns."""


SIXTEEN = World(expand=16)
"""What a drafter chooses whose passes take no longer with more nodes, as on GPUs."""
WIDE = World(expand=16, min_path_probability=0.01)
"""The same with a lower threshold, which costs bytes."""


@dataclass(slots=True)
class Outcome:
    seconds: float
    steps: int
    draft_steps: int
    needed: float
    """Sessions that need the drafter at a time, on average (`drafter_svc.metrics_source`)."""
    candidate_bytes: int
    rounds: list[verifier_pb2.Round]

    @property
    def tokens(self) -> int:
        return sum(len(round.token_ids) for round in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def engine(model: EmulatedModel, cost: LinearCost, thread: VirtualThread, blocks: int) -> EmulatedEngine:
    return EmulatedEngine(model, cost, BlockPool(blocks, BLOCK_SIZE), lambda: 0.0, thread.sleep)


@dataclass(frozen=True, slots=True)
class System:
    """A verifier and its drafter, running."""

    service: verifier_service.VerifierService
    scheduler: Scheduler
    engine: EmulatedEngine
    """The target."""
    drafting: DraftScheduler
    draft_stats: DraftStepStats
    link: VirtualLink
    stats: StepStats
    drafter: verifier_pb2.DrafterAddress

    def gateway(self) -> verifier_service.GatewayStream:
        """One gateway's stream."""
        return verifier_service.GatewayStream(self.service)


@asynccontextmanager
async def system(world: World) -> AsyncIterator[System]:
    """Must run under `capacity.clock.run`."""
    draft_thread = VirtualThread()
    target_thread = draft_thread if world.one_core else VirtualThread()
    model = EmulatedModel(vocabulary_size=VOCABULARY, acceptance=world.acceptance, fanout=world.fanout)
    draft = engine(model, world.draft, draft_thread, BLOCKS)
    proposer = ModelProposer(draft, width=world.width, proposal_tokens=32)
    drafter = start_drafter(proposer, draft.model, DraftStepLimits(512, world.expand), world.max_nodes, draft_thread)

    target = engine(EmulatedModel(vocabulary_size=VOCABULARY), world.target, target_thread, world.blocks)
    stats = StepStats()
    limits = StepLimits(512, 256, 0.25, prompt_step_s=PROMPT_STEP_S)
    parts = VirtualVerifierParts(limits, world.min_path_probability, world.planner, [stats])
    verifier = start_verifier(world.executor(target), curve_of(world.target), target_thread, parts)
    link = connect(verifier.sources, drafter, ADDRESS.address, world.delay_s)
    tasks = [drafter.running, verifier.running, link.running]
    try:
        yield System(
            verifier.service, verifier.scheduler, target, drafter.scheduler, drafter.stats, link, stats, ADDRESS
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def decode(world: World, sessions: int, tokens: int, max_draft_tokens: int) -> Outcome:
    """`sessions` at once, each `tokens` long. Must run under `run`."""
    async with system(world) as running:
        gateway = running.gateway()
        for number in range(sessions):
            gateway.receive(open_request(number, tokens, max_draft_tokens, running.drafter))
        rounds: list[verifier_pb2.Round] = []
        ended = 0
        while ended < sessions:
            replies = await gateway.outbox.take()
            rounds += [reply for reply in replies if isinstance(reply, verifier_pb2.Round)]
            ends = [reply for reply in replies if isinstance(reply, verifier_pb2.SessionEnd)]
            assert not any(end.HasField("failure") for end in ends), ends
            ended += len(ends)
        seconds = asyncio.get_running_loop().time()
    needed = running.draft_stats.needed_s / seconds
    return Outcome(seconds, running.scheduler.steps, running.drafting.steps, needed, running.link.bytes, rounds)


def open_request(
    number: int, tokens: int, max_draft_tokens: int, address: verifier_pb2.DrafterAddress
) -> verifier_pb2.DecodeRequest:
    """A greedy session of an emulated target, with a text of its own; `max_draft_tokens` 0 is without speculation."""
    return decode_request(number, [number % VOCABULARY, 1, 2, 3], tokens, max_draft_tokens, [address])


def decode_request(
    number: int,
    prompt: list[int],
    tokens: int,
    max_draft_tokens: int,
    drafters: Sequence[verifier_pb2.DrafterAddress],
    cache_salt: str = "",
) -> verifier_pb2.DecodeRequest:
    """Opens a greedy session; `max_draft_tokens` 0 is without speculation."""
    request = verifier_pb2.DecodeOpen(
        key=types_pb2.SessionKey(id=f"session-{number}", epoch=1),
        prefix=types_pb2.Prefix(token_ids=prompt, prompt_length=len(prompt)),
        sampling=types_pb2.SamplingOptions(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        max_length=len(prompt) + tokens,
        policy=verifier_pb2.DecodePolicy(max_draft_tokens=max_draft_tokens),
        drafters=drafters if max_draft_tokens else [],
        cache_salt=cache_salt,
    )
    return verifier_pb2.DecodeRequest(commands=[verifier_pb2.DecodeCommand(session=number, epoch=1, open=request)])


def main() -> None:
    rows: list[Row] = []
    for name, settings, sessions, nodes, tokens in (
        ("4 nodes a pass", World(), 1, 8, 1500),
        ("16 nodes a pass", SIXTEEN, 1, 8, 1500),
        ("wide", WIDE, 1, 8, 1500),
        ("4 nodes a pass", World(), 1, 4, 1500),
        ("4 nodes a pass", World(), 4, 4, 300),
        ("16 nodes a pass", SIXTEEN, 4, 4, 300),
        ("wide", WIDE, 4, 4, 300),
    ):
        for delay_ms in DELAYS_MS:
            outcome = run(decode(replace(settings, delay_s=delay_ms / 1e3), sessions, tokens, nodes))
            rows.append(
                {
                    "settings": name,
                    "sessions": sessions,
                    "max_draft_tokens": nodes,
                    "delay_ms": delay_ms,
                    "tok/s": outcome.tokens_per_s,
                    "candidate B / token": outcome.candidate_bytes / outcome.tokens,
                }
            )
    write("virtual", "python -m benchmarks.virtual", rows)


if __name__ == "__main__":
    main()
