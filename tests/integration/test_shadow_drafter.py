"""A shadow changes nothing but what is known: on virtual time every round is the same to the microsecond, whatever the
shadow does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from benchmarks.virtual import (
    BLOCKS,
    System,
    World,
    engine,
    open_request,
    system,
)
from capacity.clock import VirtualThread, run
from capacity.workers import connect, curve_of, start_drafter
from slipstream.engine.emulated.model import EmulatedModel, LinearCost
from slipstream.errors import Unavailable
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from slipstream.v1 import drafter_pb2, types_pb2, verifier_pb2
from tests.support.fleet import opening
from tests.support.hostile_drafter import frame
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.rounds.round_result import StepTiming
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.sources.candidate_sources import MAX_DRAFTERS, CandidateSources
from verifier_svc.sources.drafter_link import DrafterLink

SESSIONS, TOKENS = 2, 50
WORLD = World(delay_s=0.004)
SHADOW = verifier_pb2.DrafterAddress(address="shadow:1", name="new", shadow=True)


class Wild:
    """For `links.Link`: answers each command at once, as badly as is asked for."""

    def __init__(self, drafter: DrafterLink, answer: Callable[[drafter_pb2.DraftCommand], Any]) -> None:
        self.up = True
        self.commands = 0
        self._drafter, self._answer = drafter, answer

    def send(self, command: drafter_pb2.DraftCommand) -> None:
        self.commands += 1
        for response in self._answer(command):
            asyncio.get_running_loop().call_soon(self._drafter.receive, response)

    def drop(self) -> None:
        self.up = False
        self._drafter.lost(Unavailable("it was dropped."))


def lies(command: drafter_pb2.DraftCommand) -> list[drafter_pb2.DraftResponse]:
    return [frame(command, [10**6])] if command.WhichOneof("command") in ("open", "commit") else []


def floods(command: drafter_pb2.DraftCommand) -> list[drafter_pb2.DraftResponse]:
    return [frame(command, [1, 2, 3], generation=number) for number in range(400)]


def claims_the_future(command: drafter_pb2.DraftCommand) -> list[drafter_pb2.DraftResponse]:
    return [frame(command, [1], base_length=900)] if command.HasField("commit") else []


def is_silent(command: drafter_pb2.DraftCommand) -> list[drafter_pb2.DraftResponse]:
    return []


def guesses_nonsense(command: drafter_pb2.DraftCommand) -> list[drafter_pb2.DraftResponse]:
    return [frame(command, [1] * 60)] if command.WhichOneof("command") in ("open", "commit") else []


WILD = (lies, floods, claims_the_future, is_silent, guesses_nonsense)


def honest(running: System, acceptance: float) -> list[asyncio.Task[None]]:
    """A second drafter, which guesses right so often."""
    thread = VirtualThread()
    model = EmulatedModel(vocabulary_size=512, acceptance=acceptance, fanout=WORLD.fanout)
    draft = engine(model, LinearCost(0.003), thread, BLOCKS)
    proposer = ModelProposer(draft, width=4, proposal_tokens=32)
    drafter = start_drafter(proposer, draft.model, DraftStepLimits(512, 4), 64, thread)
    return [drafter.running, connect(running.service.sources, drafter, SHADOW.address, 0.001).running]


async def decoded(shadow: Any = None, *, serving: bool = True) -> list[verifier_pb2.Round]:
    """All rounds, in order. `shadow`: how often it is right, or how it is bad; None: there is none. `serving`: whether
    anybody else drafts."""
    async with system(WORLD) as running:
        gateway, pool = running.gateway(), running.service.sources
        tasks: list[asyncio.Task[None]] = []
        known = pool._link(SHADOW.address, []) if shadow is not None else None
        if isinstance(shadow, float):
            tasks = honest(running, shadow)
        elif known is not None:
            known._link = Wild(known, shadow)  # type: ignore[assignment]
        for number in range(SESSIONS):
            request = open_request(number, TOKENS, 8, running.drafter)
            del request.commands[0].open.drafters[1 if serving else 0 :]
            if shadow is not None:
                request.commands[0].open.drafters.append(SHADOW)
            gateway.receive(request)
        rounds: list[verifier_pb2.Round] = []
        ended = 0
        while ended < SESSIONS:
            replies = await gateway.outbox.take()
            assert not any(isinstance(reply, verifier_pb2.DrafterEvent) for reply in replies)
            rounds += [reply for reply in replies if isinstance(reply, verifier_pb2.Round)]
            ended += sum(isinstance(reply, verifier_pb2.SessionEnd) for reply in replies)
        assert not pool.shadows._of_session and (known is None or known.idle)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rounds


@cache
def alone() -> list[verifier_pb2.Round]:
    rounds: list[verifier_pb2.Round] = run(decoded())
    return rounds


def without_scores(rounds: list[verifier_pb2.Round]) -> list[bytes]:
    bare = []
    for done in rounds:
        copy = verifier_pb2.Round()
        copy.CopyFrom(done)
        copy.ClearField("shadows")
        for field in ("wait_us", "verify_us", "bubble_us", "cost_us"):  # sums of virtual seconds, cut to whole ones
            setattr(copy, field, round(getattr(done, field), -1))
        bare.append(copy.SerializeToString(deterministic=True))
    return bare


def scores(rounds: list[verifier_pb2.Round]) -> list[tuple[int, int]]:
    return [(score.drafted, score.accepted) for done in rounds for score in done.shadows]


@pytest.mark.parametrize("shadow", [1.0, 0.5, *WILD])
def test_rounds_are_the_same_to_the_microsecond_with_and_without_a_shadow(shadow: Any) -> None:
    rounds = run(decoded(shadow))
    assert without_scores(rounds) == without_scores(alone())
    assert not any(done.shadows for done in alone())
    told, said = scores(rounds), SESSIONS * TOKENS
    assert all(accepted <= drafted <= 8 for drafted, accepted in told)
    assert sum(1 + accepted for _, accepted in told) <= said  # no token is counted twice
    if shadow == 1.0:
        assert all(accepted == drafted for drafted, accepted in told) and len(told) < len(rounds) / 2
    elif shadow == 0.5:
        assert 0 < sum(accepted for _, accepted in told) < sum(drafted for drafted, _ in told) / 2
    else:  # each round has a score, and nothing came of any
        assert told == [(drafted, 0) for drafted, _ in told] and len(told) == len(rounds)


def test_a_shadow_is_as_good_as_the_same_drafter_when_it_serves() -> None:
    """Beside its twin, and beside plain decoding, which takes every token as a step of its own."""
    rounds = run(decoded(WORLD.acceptance))
    served = 1 + sum(done.accepted for done in rounds) / len(rounds)
    for beside in (rounds, run(decoded(WORLD.acceptance, serving=False))):
        told = scores(beside)
        assert 1 + sum(accepted for _, accepted in told) / len(told) == pytest.approx(served, rel=0.15)


def test_a_shadow_under_a_ratio_rule_is_refused() -> None:
    async def refusal() -> verifier_pb2.SessionEnd:
        async with system(WORLD) as running:
            gateway = running.gateway()
            open_ = opening([1, 2], sampling=SamplingParams(acceptance="rejection"))
            open_.drafters.append(SHADOW)
            command = verifier_pb2.DecodeCommand(session=1, epoch=1, open=open_)
            gateway.receive(verifier_pb2.DecodeRequest(commands=[command]))
            (end,) = await gateway.outbox.take()
            assert isinstance(end, verifier_pb2.SessionEnd)
            return end

    assert run(refusal()).failure.reason == "SHADOW"


def test_a_shadow_s_link_is_given_up_for_a_drafter_that_serves() -> None:
    async def full() -> tuple[int, bool]:
        async with system(WORLD) as running:
            gateway, pool = running.gateway(), running.service.sources
            request = open_request(0, TOKENS, 8, running.drafter)
            shadows = [replace_address(f"shadow:{number}") for number in range(1, 16)]
            request.commands[0].open.drafters.extend(shadows)
            gateway.receive(request)
            for number in range(1, 60):  # each session serves with a drafter of its own
                own = verifier_pb2.DrafterAddress(address=f"own:{number}", name="own")
                gateway.receive(open_request(number, TOKENS, 8, own))
            serving = [place for place, known in pool._links.items() if known.serves]
            await asyncio.sleep(1.0)
            return len(pool._links), len(serving) == 60

    assert run(full()) == (MAX_DRAFTERS, True)


def replace_address(address: str) -> verifier_pb2.DrafterAddress:
    return verifier_pb2.DrafterAddress(address=address, name=address, shadow=True)


@pytest.mark.parametrize("candidates", [[0, 0, 0], [8, 0, 1], [20, 30, 14]])
def test_the_parts_of_a_step_s_cost_make_the_whole(candidates: list[int]) -> None:
    """And whoever brings more has more of it, at least a like share of what the step takes without candidates."""
    pool = CandidateSources(types_pb2.ModelInfo(), 0.02)
    planner = Planner(pool, StepLimits(512, 256, 0.25), curve_of(LinearCost(0.02, 0.001, 0.0, 4)))
    step = [ScheduledSequence(None, 5, 4, [1], True, Selection((1,) * each)) for each in candidates]  # type: ignore[arg-type]
    tokens = 3 + sum(candidates)
    seconds = planner._curve.seconds(tokens, 3) * 1.1
    timing = StepTiming(0.0, 0.0, seconds, 0.0, 3, tokens)
    parts = [planner.feedback.cost_s(each, timing) for each in step]
    assert sum(parts) == pytest.approx(seconds)
    assert sorted(parts) == [part for _, part in sorted(zip(candidates, parts, strict=True))]
    assert min(parts) >= 0.99 * planner._curve.seconds(3, 3) / 3


@pytest.mark.parametrize("answer", [guesses_nonsense, lies])
def test_a_shadow_wakes_no_waiting_step_and_its_pace_is_not_learned(answer: Any) -> None:
    async def woken() -> tuple[int, float]:
        async with system(WORLD) as running:
            gateway, pool = running.gateway(), running.service.sources
            known, calls = pool._link(SHADOW.address, []), 0
            known._link = Wild(known, answer)  # type: ignore[assignment]

            def arrived() -> None:
                nonlocal calls
                calls += 1

            pool.on_candidates(arrived)
            gateway.receive(open_request(0, 10, 8, SHADOW))
            while not any(isinstance(reply, verifier_pb2.SessionEnd) for reply in await gateway.outbox.take()):
                pass
            assert known._link.commands > 1
            times = known.arrival_times
            return calls, sum(sum(delays._came) for delays in (times.first, times.few, times.enough))

    assert run(woken()) == (0, 0.0)
