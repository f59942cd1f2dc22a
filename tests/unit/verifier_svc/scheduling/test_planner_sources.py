"""Candidates of several drafters compete by what was accepted of each, not by what each claims."""

from __future__ import annotations

import pytest

from slipstream.engine.emulated.model import LinearCost
from slipstream.speculation.frame import Frame
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.execution.executor import ExecutorLimits
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources

MODEL, BRAGGART = 1, 2
RIGHT, WRONG = (4, 5), (8, 9)


def new_planner(*, trees: bool = True) -> Planner:
    curve = CostCurve()
    for size in BUCKETS:
        curve.record(size, 1, [LinearCost(0.02, 0.0001)(size, 1)])
    limits = StepLimits(512, 256, 0.25, ExecutorLimits(verifies_trees=trees))
    return Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), limits, curve)


def session(*, room: int = 2) -> Session:
    """The model has the next two tokens, and says 0.8 of each; another drafter two wrong ones, and says 0.99."""
    made = new_session([1, 2, 3], max_draft_tokens=room, computed=2)
    made.name_source(MODEL, "model")
    made.name_source(BRAGGART, "braggart")
    made.tree.graft(Frame(3, 0, 1, RIGHT, (-0.22, -0.22), source=MODEL))
    made.tree.graft(Frame(3, 0, 1, WRONG, (-0.01, -0.01), source=BRAGGART))
    return made


def tokens(planner: Planner, *, room: int = 2) -> tuple[int, ...]:
    (scheduled,) = planner.plan([session(room=room)]).step
    return scheduled.selection.token_ids


def teach(planner: Planner, rounds: int) -> None:
    """Rounds with room for all four, of which the model's are accepted."""
    for _ in range(rounds):
        (scheduled,) = planner.plan([session(room=4)]).step
        chosen = scheduled.selection
        path = [node for node, token in enumerate(chosen.token_ids) if token in RIGHT]
        planner.feedback.observe_round(scheduled, AcceptanceResult(tuple(path), 9))


def test_a_drafter_that_claims_too_much_loses_its_places_to_one_that_is_right() -> None:
    planner = new_planner()
    assert set(tokens(planner)) == set(WRONG), "claims are believed at first"
    teach(planner, 60)
    assert set(tokens(planner)) == set(RIGHT)


def test_the_first_candidates_are_the_likeliest() -> None:
    planner = new_planner()
    teach(planner, 60)
    plan = planner.plan([session(room=4)])
    [paths] = plan.paths.values()
    assert paths == sorted(paths, reverse=True)
    assert plan.step[0].selection.token_ids[:2] == RIGHT
    assert plan.tokens == pytest.approx(1.0 + sum(paths[: len(plan.step[0].selection)]))


def test_where_only_chains_are_verified_calibration_replaces_no_candidate_by_another() -> None:
    planner = new_planner(trees=False)
    teach(planner, 60)
    assert tokens(planner) in (WRONG, ()), "calibration may leave them out, and puts no others in their place"
