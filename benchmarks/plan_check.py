"""What `slipstream plan` predicts against what the system does.

usage: python -m benchmarks.plan_check            (the services' own code on a virtual clock: no noise)
       python -m benchmarks.plan_check processes  (real processes, wall time; for a quiet machine)

An emulated pair, so that costs and acceptance are known: a target of 30 ms a pass and 0.2 ms for each token beyond 32,
a drafter of 4 ms, right in 0.75 of all places, the truth among its next three guesses in 0.7 of the others. The same
requests go to both: some at once, one after the other, or as a Poisson process. Compared are medians of TTFT and TPOT,
tokens a second, and tokens a round.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.processes import ANYWHERE, EMULATED_DRAFTER, Far
from benchmarks.records import Row, write
from benchmarks.virtual import VOCABULARY, System, World, system
from capacity.cell import Cell, Outcome, Simulation, way_s
from capacity.clock import run
from capacity.settings import Acceptance, DraftSettings, Verifying
from slipstream.client.client import complete
from slipstream.engine.emulated.model import LinearCost
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2

TARGET, DRAFT = LinearCost(0.030, 0.0002, 0.0, 32), LinearCost(0.004)
ACCEPTANCE = Acceptance([0.75], 0.7)
TARGET_MODEL = (
    f"emulated:vocabulary={VOCABULARY}&base_ms={1e3 * TARGET.base_s:g}&token_ms={1e3 * TARGET.per_token_s:g}"
    f"&flat={TARGET.free_tokens}"
)
DRAFT_MODEL = (
    f"emulated:vocabulary={VOCABULARY}&base_ms={1e3 * DRAFT.base_s:g}&acceptance={ACCEPTANCE.by_depth[0]}"
    f"&fanout={ACCEPTANCE.fanout}"
)
"""Model settings of real processes with the simulated costs."""
NODES = 6
OUTPUT = 80
SEEDS = 8
"""Runs of the simulation, each with its own luck with candidates; the system runs once, which leaves some per cent."""
CLIENT_S = 0.001
"""One way between a client and the verifier."""
HOST_S = {False: (0.00135, 0.00005), True: (0.00215, 0.00015)}
DRAFT_HOST_S = (0.0016, 0.00009)
"""Costs of this machine, without and with speculation (`python -m benchmarks.host`): seconds that a step of the
verifier and a pass of the drafter take besides the pass, and more for each session. Processes alone have them."""


@dataclass(frozen=True, slots=True)
class Load:
    speculate: bool
    delay_ms: float
    at_once: int = 0
    """One after the other on each of so many."""
    rate: float = 0.0
    """Requests a second, where they come when they come."""
    prompt: int = 16
    sessions: int = 24

    @property
    def name(self) -> str:
        return f"{self.at_once} at once" if self.at_once else f"{self.rate:g} a second"

    def gaps(self) -> list[float]:
        """Seconds before each request."""
        draws = random.Random(1)
        return [draws.expovariate(self.rate) if self.rate else 0.0 for _ in range(self.sessions)]


LOADS = [
    Load(speculate, delay_ms, at_once, rate, prompt, sessions)
    for speculate, delay_ms in ((False, 0.0), (True, 0.0), (True, 5.0), (True, 20.0))
    for at_once, rate, prompt, sessions in ((1, 0.0, 16, 16), (6, 0.0, 16, 36), (0, 1.5, 200, 36))
]


@dataclass
class Seen:
    """Latencies of one run, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        return {
            "TTFT ms": 1e3 * statistics.median(self.ttft),
            "TPOT ms": 1e3 * statistics.median(self.tpot),
            "tok/s": self.tokens / self.seconds,
            "tokens / round": self.tokens / self.rounds,
        }


def predicted(load: Load, *, processes: bool) -> dict[str, float]:
    host, draft_host = (HOST_S[load.speculate], DRAFT_HOST_S) if processes else ((0.0, 0.0), (0.0, 0.0))
    verifying = Verifying(TARGET, ACCEPTANCE, *host, max_draft_tokens=NODES)
    drafting = DraftSettings(DRAFT, *draft_host, load.delay_ms / 1e3)
    cell = Cell(verifying, drafting if load.speculate else None, client_s=CLIENT_S)
    runs = [_simulated(cell, load, seed).figures() for seed in range(SEEDS if load.speculate else 1)]
    return {name: statistics.mean(figures[name] for figures in runs) for name in runs[0]}


def _simulated(cell: Cell, load: Load, seed: int) -> Seen:
    sizes = [(load.prompt, OUTPUT)] * load.sessions
    with Simulation(cell, seed) as simulation:
        if load.at_once:
            simulation.open_closed_loop(sizes, load.at_once)
        else:
            simulation.open_arrivals([(gap, *size) for gap, size in zip(load.gaps(), sizes, strict=True)])
        return _seen(simulation.observe())


def _seen(outcome: Outcome) -> Seen:
    done = outcome.sessions
    rounds = sum(session.rounds for session in done)
    ttft, tpot = [session.ttft_s for session in done], [session.tpot_s for session in done]
    return Seen(ttft, tpot, outcome.tokens, rounds, outcome.seconds)


Ask = Callable[[int], Awaitable[None]]


async def drive(load: Load, ask: Ask) -> None:
    """Sends the load's requests, each by its number."""
    if load.at_once:
        numbers = iter(range(load.sessions))

        async def client(mine: Iterator[int]) -> None:
            for number in mine:
                await ask(number)

        await asyncio.gather(*(client(numbers) for _ in range(load.at_once)))
        return
    async with asyncio.TaskGroup() as tasks:
        for number, gap in enumerate(load.gaps()):
            await asyncio.sleep(gap)
            tasks.create_task(ask(number))  # type: ignore[arg-type]


async def virtual(load: Load) -> Seen:
    """Must run under `run`."""
    right, fanout = ACCEPTANCE.by_depth[0], ACCEPTANCE.fanout
    world = World(load.delay_ms / 1e3, TARGET, DRAFT, right, fanout)
    async with system(world) as running:
        reader = _Reader(running, load)
        began = asyncio.get_running_loop().time()
        reading = asyncio.create_task(reader.read())
        await drive(load, reader.ask)
        reader.seen.seconds = asyncio.get_running_loop().time() - began
        reading.cancel()
    return reader.seen


class _Reader:
    """One gateway's stream, and what came on it when."""

    def __init__(self, running: System, load: Load) -> None:
        self.seen = Seen()
        self._running, self._load = running, load
        self._stream = running.gateway()
        self._ways = random.Random(2)
        self._ended: dict[int, asyncio.Event] = {}
        self._times: dict[int, list[float]] = {}

    async def ask(self, number: int) -> None:
        self._ended[number] = asyncio.Event()
        self._times[number] = [asyncio.get_running_loop().time()]
        await asyncio.sleep(way_s(CLIENT_S, self._ways))
        self._stream.receive(_open(number, self._load, self._running.drafter))
        await self._ended[number].wait()
        sent, first, *rest = self._times[number]
        self.seen.ttft.append(first - sent + CLIENT_S)
        self.seen.tpot.append((rest[-1] - first) / (OUTPUT - 1))

    async def read(self) -> None:
        while True:
            for reply in await self._stream.outbox.take():
                if isinstance(reply, verifier_pb2.Round):
                    self._times[reply.session].append(asyncio.get_running_loop().time())
                    self.seen.tokens += len(reply.token_ids)
                    self.seen.rounds += 1
                elif isinstance(reply, verifier_pb2.SessionEnd):
                    self._ended[reply.session].set()


def _prompt(number: int, load: Load) -> list[int]:
    return [number % VOCABULARY, *((number * 7 + place) % VOCABULARY for place in range(1, load.prompt))]


def _open(number: int, load: Load, drafter: verifier_pb2.DrafterAddress) -> verifier_pb2.DecodeRequest:
    prompt, nodes = _prompt(number, load), NODES * load.speculate
    request = verifier_pb2.DecodeOpen(
        key=types_pb2.SessionKey(id=f"session-{number}", epoch=1),
        prefix=types_pb2.Prefix(token_ids=prompt, prompt_length=len(prompt)),
        sampling=types_pb2.SamplingOptions(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        max_length=len(prompt) + OUTPUT,
        policy=verifier_pb2.DecodePolicy(max_draft_tokens=nodes),
        drafters=[drafter] if nodes else [],
    )
    return verifier_pb2.DecodeRequest(commands=[verifier_pb2.DecodeCommand(session=number, epoch=1, open=request)])


def request(number: int, load: Load, tokens: int = OUTPUT) -> gateway_pb2.GenerateRequest:
    """The request to a gateway for that session."""
    asked = gateway_pb2.GenerateRequest(
        max_tokens=tokens,
        ignore_eos=True,
        sampling=gateway_pb2.SamplingOptions(temperature=0.0),  # otherwise the drafter draws its guesses, too
        speculation=gateway_pb2.SpeculationOptions(disabled=not load.speculate, max_draft_tokens=NODES),
    )
    asked.prompt_token_ids.token_ids.extend(_prompt(number, load))
    return asked


async def processes(load: Load) -> Seen:
    """Verifier, drafter, gateway and a line between as processes of their own; an idle run first."""
    far = Far(TARGET_MODEL, DRAFT_MODEL, load.delay_ms, settings=EMULATED_DRAFTER | {"GATEWAY_LISTEN": ANYWHERE})
    async with far.serving() as server, channel(server) as line:
        seen = Seen()

        async def ask(number: int) -> None:
            done = await complete(line, request(number, load))
            statistics_ = done.finished.statistics
            seen.ttft.append(statistics_.ttft_s)
            seen.tpot.append(done.tpot_s or 0.0)
            seen.tokens += len(done.token_ids)
            seen.rounds += statistics_.rounds

        await ask(VOCABULARY - 1)
        seen = Seen()
        began = asyncio.get_running_loop().time()
        await drive(load, ask)
        seen.seconds = asyncio.get_running_loop().time() - began
    return seen


def compared(load: Load, ours: dict[str, float], theirs: dict[str, float]) -> Row:
    row: Row = {"speculation": "on" if load.speculate else "off", "delay_ms": load.delay_ms, "load": load.name}
    for name, value in theirs.items():
        row |= {f"{name}, seen": value, "planned": ours[name], "off by": f"{ours[name] / value - 1.0:+.1%}"}
        row = {(f"{key}, {name}" if key in ("planned", "off by") else key): cell for key, cell in row.items()}
    return row


def worst(rows: Sequence[Row]) -> float:
    """The largest share by which anything is off."""
    return max(abs(float(str(cell).rstrip("%"))) / 1e2 for row in rows for key, cell in row.items() if "off by" in key)


def main(real: bool) -> None:
    rows: list[Row] = []
    for load in LOADS:
        seen = asyncio.run(processes(load)) if real else run(virtual(load))
        rows.append(compared(load, predicted(load, processes=real), seen.figures()))
        print(rows[-1], flush=True)
    name = "plan_check_processes" if real else "plan_check"
    write(name, f"python -m benchmarks.plan_check{' processes' if real else ''}", rows)
    print(f"largest difference: {worst(rows):.1%}")


if __name__ == "__main__":
    main(sys.argv[1:2] == ["processes"])
