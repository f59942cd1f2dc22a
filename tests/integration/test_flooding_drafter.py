"""A drafter that sends more than can be used is cut off after a bounded amount of work; others keep their pace."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import pytest

from slipstream.engine.factory import open_engine
from slipstream.speculation.frame import TreeLimits
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import drafter_pb2, verifier_pb2
from tests.support.fleet import Decoded, Gateway, VerifierServer, drafter, emulated_text, gateway, until, verifier
from tests.support.flooder import FLOODS, flood
from tests.support.hostile_drafter import Command, HostileDrafter, Responses, hostile
from verifier_svc.sources import flow_control
from verifier_svc.sources.drafter_link import DrafterLink

PROMPT = [7, 8, 9]
TOKENS = 120
SLOW = 300.0
"""Frames a second that are enough for a drafter of 4 ms a pass, and that a flood exceeds on any machine."""
CALLS_PER_NODE = 20
"""Python calls for one node of a frame; looking at each entry of a distribution would take over 500."""
USUAL = ("repeats", "distributions")
"""Floods of which `make test` measures what they cost others."""
CLOSE = verifier_pb2.DecodeClose()
ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def fleet(
    good: str = "emulated:acceptance=0.9", target: str = "emulated:base_ms=5"
) -> AsyncIterator[tuple[VerifierServer, Gateway, str]]:
    async with (
        drafter(open_engine(good)) as friend,
        verifier(open_engine(target)) as server,
        gateway(server.address) as client,
    ):
        yield server, client, friend


@contextmanager
def flooder(kind: str) -> Iterator[str]:
    """The address of one with a core of its own."""
    environment = os.environ | {"GRPC_VERBOSITY": "NONE"}
    command = [sys.executable, "-m", "tests.support.flooder", kind]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def failures(decoded: Decoded) -> list[str]:
    return [event.failure.reason for event in decoded.events if event.HasField("failure")]


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_is_cut_off_after_bounded_work(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    sizes: list[int] = []
    receive = DrafterLink.receive

    def counted(self: DrafterLink, frame: drafter_pb2.DraftResponse) -> None:
        attached = list(self._by_session)
        receive(self, frame)
        if self.address == enemy.address:
            frames.append(1)
            sizes.extend(session.tree.node_count for session in attached)

    async with hostile(flood(kind)) as enemy, fleet() as (_, client, _):
        monkeypatch.setattr(DrafterLink, "receive", counted)
        monkeypatch.setattr(flow_control, "FRAMES_PER_S", SLOW)
        opened = time.monotonic()
        number, decoded = await client.open(PROMPT, tokens=50_000, drafters=[enemy.address])
        await until(lambda: "FLOODING" in failures(decoded))
        looked_at, seconds = len(frames), time.monotonic() - opened
        rounds = len(decoded.rounds)
        await until(lambda: len(decoded.rounds) >= rounds + 100)
        # As many again after every new dial, and no dial sooner than the last flood's debt was paid.
        assert len(frames) <= looked_at + 3 * SLOW
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)
    assert max(sizes, default=0) <= TreeLimits().nodes
    assert looked_at <= SLOW * (1.0 + seconds) + 1
    assert failures(decoded).count("FLOODING") == 1
    assert decoded.token_ids == emulated_text(PROMPT, len(decoded.token_ids))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.slow) for kind in FLOODS]
)
async def test_while_one_drafter_floods_other_sessions_keep_their_pace(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may take the machine in the middle: of three tries one must do."""
    monkeypatch.setattr(flow_control, "FRAMES_PER_S", SLOW)
    paces: list[tuple[float, float]] = []
    with flooder(kind) as enemy:
        async with fleet("emulated:base_ms=4&acceptance=0.9", "emulated:base_ms=8") as (_, client, friend):
            number, good = await client.open([1, 2], tokens=50_000, drafters=[friend], session_id="good")
            await until(lambda: len(good.rounds) > 20)
            while len(paces) < 3 and not any(kept(*each) for each in paces):
                paces.append((await pace(good), await flooded_pace(good, client, enemy)))
            assert any(kept(*each) for each in paces), paces
            await until(lambda: good.accepted > 50)  # drafted for all the while, however slow the machine
            assert failures(good) == []
            await client.command(number, close=CLOSE)


def kept(quiet_us: float, flooded_us: float) -> bool:
    return flooded_us < 3 * quiet_us + 5_000


async def pace(decoded: Decoded, enough: Callable[[], bool] = lambda: True) -> float:
    """Median microseconds from round to round, over 100 of them at least."""
    start = len(decoded.rounds)
    await until(lambda: len(decoded.rounds) > start + 100 and enough())
    return statistics.median(done.wait_us + done.verify_us for done in decoded.rounds[start:])


async def flooded_pace(decoded: Decoded, client: Gateway, enemy: str) -> float:
    """Beside a flood into another session, renewed whenever it is cut off, which must have happened."""
    flooded: list[Decoded] = []

    async def floods() -> None:
        while True:
            session = (await client.open(PROMPT, tokens=TOKENS, drafters=[enemy]))[1]
            flooded.append(session)
            await until(lambda session=session: "FLOODING" in failures(session) or session.done.is_set())

    flooding = asyncio.create_task(floods())
    try:
        return await pace(decoded, lambda: any("FLOODING" in failures(each) for each in flooded))
    finally:
        flooding.cancel()
        for each in flooded:
            await until(each.done.is_set)
            assert each.token_ids == emulated_text(PROMPT, TOKENS)


class Work:
    """Counts the Python calls (a generator's next value is one) that each frame causes on the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[int] = []
        self._calls = 0
        receive = DrafterLink.receive

        def counted(link: DrafterLink, frame: drafter_pb2.DraftResponse) -> None:
            self._calls = 0
            sys.setprofile(self._count)
            try:
                receive(link, frame)
            finally:
                sys.setprofile(None)
            self.frames.append(self._calls)

        monkeypatch.setattr(DrafterLink, "receive", counted)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")


@pytest.mark.parametrize("again", [False, True], ids=["new nodes", "the same again"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
async def test_the_cost_of_a_frame_depends_on_its_nodes_and_not_on_its_distributions(
    rule: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One frame for each command is within every allowance: each has as many distributions, as long as can be."""
    work = Work(monkeypatch)

    def answer(_: HostileDrafter, command: Command) -> Responses:
        if command.HasField("open") or command.HasField("commit"):
            yield FLOODS["distributions"](command)
            if again:
                yield FLOODS["distributions"](command)

    sampling = SamplingParams(temperature=1.0, seed=4, acceptance=rule)
    async with hostile(answer) as enemy, fleet() as (_, client, _):
        _, decoded = await client.open(PROMPT, tokens=40, drafters=[enemy.address], sampling=sampling, trusted=True)
        await until(decoded.done.is_set)
    print(max(work.frames), len(work.frames), failures(decoded))
    assert max(work.frames) <= CALLS_PER_NODE * TreeLimits().frame_nodes
