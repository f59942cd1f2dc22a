"""A drafter that sends more than can be used is cut off after a bounded amount of work; others keep their pace."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from slipstream.engine.opening import open_engine
from slipstream.frame import Limits
from slipstream.v1 import drafter_pb2, verifier_pb2
from tests.fleet import Decoded, Gateway, Verifier, drafter, emulated_text, gateway, until, verifier
from tests.flooder import FLOODS, flood
from tests.hostile_drafter import hostile
from verifier_svc.allowance import COMMANDS, FRAMES_PER_S, Allowance, Rate
from verifier_svc.drafter import Drafter

PROMPT = [7, 8, 9]
TOKENS = 300
CLOSE = verifier_pb2.DecodeClose()
ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[Verifier, Gateway, str]]:
    async with (
        drafter(open_engine("emulated:acceptance=0.9")) as friend,
        verifier(open_engine("emulated:base_ms=5")) as server,
        gateway(server.address) as client,
    ):
        yield server, client, friend


@contextmanager
def flooder(kind: str) -> Iterator[str]:
    """The address of one with a core of its own."""
    environment = os.environ | {"GRPC_VERBOSITY": "NONE"}
    command = [sys.executable, "-m", "tests.flooder", kind]
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
    receive = Drafter.receive

    def counted(self: Drafter, frame: drafter_pb2.DraftResponse) -> None:
        attached = list(self._by_session)
        receive(self, frame)
        if self.address == enemy.address:
            frames.append(1)
            sizes.extend(session.tree.node_count for session in attached)

    async with hostile(flood(kind)) as enemy, fleet() as (_, client, _):
        monkeypatch.setattr(Drafter, "receive", counted)
        number, decoded = await client.open(PROMPT, tokens=50_000, drafters=[enemy.address])
        await until(lambda: "FLOODING" in failures(decoded))
        looked_at, rounds = len(frames), len(decoded.rounds)
        await until(lambda: len(decoded.rounds) >= rounds + 100)
        # Another 2000 after every new dial, and no dial sooner than the last flood's debt was paid.
        assert len(frames) <= looked_at + 3 * FRAMES_PER_S
        await client.command(number, close=CLOSE)
        await until(decoded.done.is_set)
    assert max(sizes, default=0) <= Limits().nodes
    assert looked_at <= FRAMES_PER_S * (1.0 + 0.02 * rounds) + 1
    assert failures(decoded).count("FLOODING") == 1
    assert decoded.token_ids == emulated_text(PROMPT, len(decoded.token_ids))


@pytest.mark.parametrize("kind", FLOODS)
async def test_while_one_drafter_floods_other_sessions_keep_their_pace(kind: str) -> None:
    """Medians of a session's rounds, without and with a flood into another session, renewed whenever it is cut off.

    The loop ends only once a flood was seen: that it happened is part of the test.
    """
    with flooder(kind) as enemy:
        async with fleet() as (_, client, friend):
            number, good = await client.open([1, 2], tokens=50_000, drafters=[friend], session_id="good")
            await until(lambda: len(good.rounds) > 20)
            start = len(good.rounds)
            await until(lambda: len(good.rounds) > start + 150)
            quiet = pace(good, start)
            start = len(good.rounds)
            flooded: list[Decoded] = []
            while len(good.rounds) <= start + 150 or not any("FLOODING" in failures(each) for each in flooded):
                if not flooded or "FLOODING" in failures(flooded[-1]) or flooded[-1].done.is_set():
                    flooded.append((await client.open(PROMPT, tokens=TOKENS, drafters=[enemy]))[1])
                rounds = len(good.rounds)
                await until(lambda rounds=rounds: len(good.rounds) > rounds)
            assert pace(good, start) < 3 * quiet + 5_000
            assert good.accepted > 50 and failures(good) == []
            await client.command(number, close=CLOSE)
            for decoded in flooded:
                await until(decoded.done.is_set)
                assert decoded.token_ids == emulated_text(PROMPT, TOKENS)


def pace(decoded: Decoded, start: int) -> float:
    """Median microseconds from round to round."""
    return statistics.median(done.wait_us + done.verify_us for done in decoded.rounds[start:])


def test_who_answers_every_command_with_a_whole_tree_never_runs_out() -> None:
    """Node by node, as late as it likes within COMMANDS."""
    for late in range(1, COMMANDS):
        allowance = Allowance()
        for _ in range(late):
            allowance.earn(8)
        for _ in range(100):
            allowance.earn(8)
            assert all(allowance.spend(2) for _ in range(8))


def test_what_is_not_used_is_saved_up_to_a_bound() -> None:
    allowance = Allowance()
    for _ in range(10_000):
        allowance.earn(8)
    spent = 0
    while allowance.spend(1):
        spent += 1
    assert spent == COMMANDS * 16
    allowance.earn(8)
    assert not allowance.spend(17) and not allowance.spend(1)


def test_frames_come_in_bursts_but_not_faster_for_long() -> None:
    rate = Rate(0.0)
    assert all(rate.admit(0.0) for _ in range(int(FRAMES_PER_S)))
    assert not rate.admit(0.0)
    assert not rate.admit(0.9)  # the debt of a flood
    steady = Rate(0.0)
    assert all(steady.admit(number / FRAMES_PER_S) for number in range(10 * int(FRAMES_PER_S)))
