"""Drafters draft for the sessions that gain by it: what one text gains decides nothing for the next."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.engine.emulated.model import LinearCost
from slipstream.speculation.frame import Frame
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
from verifier_svc.rounds.round_result import StepTiming
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.session import DraftedSession, Session
from verifier_svc.sources.candidate_sources import CandidateSources

SLOWER = 1.1
"""Times as long as steps with drafting take: the drafter is on the verifier's cores."""


class OneDrafter(CandidateSources):
    """All sessions have it; `changes` are those for which it begins or ceases to draft."""

    def __init__(self) -> None:
        super().__init__(types_pb2.ModelInfo(), 0.0)
        self.changes: list[tuple[DraftedSession, bool]] = []

    def has_source(self, session: DraftedSession) -> bool:
        return True

    def drafting_changed(self, session: DraftedSession) -> None:
        self.changes.append((session, session.drafting))


class Verifier:
    """Its time is what the curve says, longer by SLOWER while drafters draft."""

    def __init__(self) -> None:
        self.cost = LinearCost(0.02, 0.0001)
        curve = CostCurve()
        for size in BUCKETS:
            curve.record(size, 1, [self.cost(size, 1)])
        self.sources = OneDrafter()
        self.planner = Planner(self.sources, StepLimits(512, 256, 0.25), curve)
        self.now = 0.0

    def decode(self, steps: int, guessed: Callable[[int], int]) -> tuple[Session, int]:
        """A new session, and how many of its steps had candidates. Of each step's drafts, as many as `guessed` says are
        right."""
        session = new_session([1, 2, 3], max_draft_tokens=4, max_length=1000, computed=2)
        session.name_source(1, "suffix")
        self.planner.open_session(session)
        drafted = 0
        for step in range(steps):
            if self.sources.wants(session) and guessed(step):
                session.tree.graft(Frame(len(session.tokens), step, 1, (4, 5), (-0.1, -0.1), source=1))
            plan = self.planner.plan([session])
            [scheduled] = plan.step
            size = 1 + len(scheduled.selection)
            drafted += size > 1
            seconds = self.cost(size, 1) * (SLOWER if self.sources.wants(session) else 1.0)
            path = tuple(range(min(guessed(step), size - 1)))
            timing = StepTiming(self.now, self.now, self.now + seconds, 0.0, 1, size)
            self.now += seconds
            self.planner.feedback.observe_step(plan, timing, [AcceptanceResult(path, 9)])
            session.commit([*scheduled.selection.token_ids[: len(path)], 9], len(session.tokens) + len(path))
        return session, drafted


def test_a_text_without_gain_pauses_and_one_behind_it_drafts_at_once() -> None:
    verifier = Verifier()
    for _ in range(6):
        answer, _ = verifier.decode(80, lambda step: 0)
    assert verifier.planner.drafting_slowdown > 1.05
    assert (answer, False) in verifier.sources.changes and verifier.planner.pause_cause in ("slower", "")
    for _ in range(3):
        copy, drafted = verifier.decode(60, lambda step: 2)
        assert copy.drafting and drafted == 60


def test_the_cause_of_a_drafting_pause_is_reported() -> None:
    verifier = Verifier()
    causes = set[str]()
    for _ in range(6):
        verifier.decode(80, lambda step: 0)
        causes.add(verifier.planner.pause_cause)
    assert "slower" in causes
