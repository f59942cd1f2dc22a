"""An executor's bound on the sessions of one step: some places are for prompts, the others for those that decode."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.executor import ExecutorLimits
from verifier_svc.scheduling.planner import MOST_MASKS_S, Planner
from verifier_svc.scheduling.step_plan import StepLimits, StepPlan
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.candidate_sources import CandidateSources


def session(number: int, pending: int) -> Session:
    tokens = [1] * 8
    request = SessionRequest(
        id=f"s{number}",
        number=number,
        epoch=1,
        sampling=SamplingParams(temperature=0.0),
        prompt_length=1,
        max_length=64,
        stop_token_ids=frozenset(),
        max_draft_tokens=4,
    )
    return Session(
        request,
        tokens=tokens,
        credit=None,
        tree=CandidateTree(tokens),
        history=None,
        arrival=number,
        computed=len(tokens) - pending,
        idle_since=float(number),
    )


def planned(decoding: int, prompts: int, most: int) -> StepPlan:
    async def plan() -> StepPlan:
        sources = CandidateSources(types_pb2.ModelInfo(), 0.0)
        limits = StepLimits(512, 256, 0.0, ExecutorLimits(4, verifies_trees=False, max_sequences=most))
        sessions = [session(number, 1 if number < decoding else 5) for number in range(decoding + prompts)]
        return Planner(sources, limits, CostCurve()).plan(sessions)

    return asyncio.run(plan())


@pytest.mark.parametrize(
    ("decoding", "prompts", "expected"),
    [(20, 0, (8, 0)), (20, 1, (7, 1)), (20, 20, (6, 2)), (3, 20, (3, 5)), (0, 20, (0, 8)), (2, 2, (2, 2))],
)
def test_a_step_holds_as_many_sessions_as_the_executor_takes(
    decoding: int, prompts: int, expected: tuple[int, int]
) -> None:
    step = planned(decoding, prompts, 8).step
    found = [each.session.request.number for each in step]
    assert (sum(number < decoding for number in found), sum(number >= decoding for number in found)) == expected
    assert found == sorted(found), "those that waited longest, and the first that came"


def test_an_executor_without_a_bound_takes_all() -> None:
    assert len(planned(20, 10, ExecutorLimits().max_sequences).step) == 30


class NeverSettled:
    """A constraint that computes masks of candidates for as long as these come, and can be in a step all the while."""

    ready = True

    def worth_waiting_s(self) -> float:
        return 0.005


def test_a_step_waits_for_masks_in_bounded_time() -> None:
    planner = Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), StepLimits(512, 256, 0.25), CostCurve())
    session = new_session([1, 2, 3], computed=2)
    session.constraint = NeverSettled()  # type: ignore[assignment]
    held_s, waited_s = 0.005, 0.0
    while held_s > 0.0 and waited_s < 1.0:
        held_s = planner.hold_s(planner.plan([session]), waited_s)
        waited_s += held_s
    assert 0.25 < waited_s < 0.25 + 2 * MOST_MASKS_S
