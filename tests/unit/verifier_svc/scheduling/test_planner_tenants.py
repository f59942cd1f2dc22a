"""What one tenant's candidates came to decides nothing for another tenant's, whatever both call their work; what those
of long contexts came to, nothing for short ones."""

from __future__ import annotations

import pytest

from slipstream.engine.emulated.model import LinearCost
from slipstream.speculation.frame import Frame
from slipstream.tenants import MOST_TENANTS, PerTenant
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits, StepPlan
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources

SOURCE = 1


def session(tenant: str, length: int = 3) -> Session:
    """A session of so many tokens with three likely candidates in a row."""
    prompt = list(range(1, length + 1))
    made = new_session(prompt, max_length=100_000, workload="code", tenant=tenant, computed=length - 1)
    made.name_source(SOURCE, "model")
    made.tree.graft(Frame(length, 0, 1, (4, 5, 6), (-0.05, -0.05, -0.05), source=SOURCE))
    return made


@pytest.fixture
def planner() -> Planner:
    curve = CostCurve()
    for size in BUCKETS:
        curve.record(size, 1, [LinearCost(0.02, 0.001)(size, 1)])
    return Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), StepLimits(512, 256, 0.25), curve)


def planned(planner: Planner, tenant: str, length: int = 3) -> tuple[int, float, float]:
    """Candidates in a step of the tenant's own, what they are expected to bring, and what one more would."""
    plan: StepPlan = planner.plan([session(tenant, length)])
    (scheduled,) = plan.step
    gain = planner._expected_gain(scheduled, plan, SOURCE)
    return len(scheduled.selection), gain.worth, gain.gain


def test_a_tenant_whose_candidates_are_all_rejected_costs_no_other_its_drafting(planner: Planner) -> None:
    before = planned(planner, "victim")
    for _ in range(500):
        (scheduled,) = planner.plan([session("attacker")]).step
        if not len(scheduled.selection):
            break
        planner.feedback.observe_round(scheduled, AcceptanceResult((), 9))
    assert planned(planner, "attacker")[0] == 0 < before[0]
    assert planned(planner, "victim") == pytest.approx(before)
    unnamed = planned(planner, "")
    assert unnamed == pytest.approx(before)  # sessions without a tenant share a place of their own


def test_a_drafter_that_fails_at_long_contexts_goes_on_at_short_ones(planner: Planner) -> None:
    before = planned(planner, "victim")
    for _ in range(100):
        (short,) = planner.plan([session("victim")]).step
        planner.feedback.observe_round(short, AcceptanceResult(tuple(range(len(short.selection))), 9))
        (long,) = planner.plan([session("victim", 5000)]).step
        planner.feedback.observe_round(long, AcceptanceResult((), 9))
    (_, short_worth, _), (_, long_worth, _) = planned(planner, "victim"), planned(planner, "victim", 5000)
    assert short_worth >= before[1] and long_worth < 0.2 * short_worth
    assert long_worth < planned(planner, "victim", 9000)[1] < short_worth, "never measured: the other lengths count"


def test_only_so_many_tenants_are_remembered() -> None:
    values = PerTenant(list[int])
    values["kept"].append(1)
    for number in range(2 * MOST_TENANTS):
        assert values[str(number)] == []
        assert values["kept"] == [1]
    assert len(list(values)) == MOST_TENANTS
