"""No step holds more candidates and window rows of a session than keep every row's bits, whatever is asked for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.factory import open_engine
from slipstream.engine.kernels.attention import MOST_NODES
from slipstream.engine.model_info import MOST_CANDIDATES
from slipstream.errors import InvalidArgument
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame, TreeLimits
from slipstream.speculation.lookahead_window import LookaheadSize, LookaheadWindow, NgramPool
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.config import VerifierConfig
from verifier_svc.estimators.cost_curve import CostCurve
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.scheduling.planner import Planner
from verifier_svc.scheduling.step_plan import StepLimits
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources

SOURCE = 1
PROMPT = [1, 2, 3]


def session(candidates: int, asked: int, *, drawn: bool, window: bool, chance: random.Random) -> Session:
    """A session with a random tree of so many candidates, that may have `asked` of them in a step."""
    tree = CandidateTree(PROMPT, TreeLimits(nodes=1000, depth=1000))
    sampling = SamplingParams(acceptance="rejection" if drawn else "coupled")
    made = new_session(
        PROMPT, max_length=5000, max_draft_tokens=asked, computed=2, tree=tree, sampling=sampling, credit=None
    )
    made.name_source(SOURCE, "model")
    for start in range(0, candidates, 50):
        tokens = tuple(range(10 + start, 10 + min(start + 50, candidates)))
        parents = tuple(chance.choice((0, start + index)) for index in range(len(tokens)))  # chains below the root
        tree.graft(Frame(len(PROMPT), 0, 1 + start, tokens, (-0.01,) * len(tokens), parents=parents, source=SOURCE))
    if window:
        made.window = LookaheadWindow(LookaheadSize(64, 16, 3), made.tokens, frozenset(), NgramPool(3))
    return made


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 700), st.booleans(), st.booleans()), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_a_step_holds_no_more_than_keeps_every_row_s_bits(
    asked: list[tuple[int, int, bool, bool]], chance: random.Random
) -> None:
    executor = EmbeddedExecutor(open_engine("emulated:vocabulary=1000"))
    limits = StepLimits(4096, 256, 0.25, executor.limits, always_speculate=True)
    planner = Planner(CandidateSources(types_pb2.ModelInfo(), 0.0), limits, CostCurve(free_candidates=True))
    sessions = [
        session(candidates, most, drawn=drawn, window=window, chance=chance)
        for candidates, most, drawn, window in asked
    ]
    for scheduled in planner.plan(sessions).step:
        assert len(scheduled.selection) + len(scheduled.window) <= min(
            MOST_NODES, scheduled.session.request.max_draft_tokens
        )


def test_a_setting_above_what_a_pass_takes_is_refused() -> None:
    assert VerifierConfig(model="m", max_draft_tokens=MOST_CANDIDATES)
    with pytest.raises(InvalidArgument, match=f"VERIFIER_MAX_DRAFT_TOKENS={MOST_CANDIDATES + 1}"):
        VerifierConfig(model="m", max_draft_tokens=MOST_CANDIDATES + 1)
