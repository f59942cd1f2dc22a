"""A verifier's step costs no more Python calls than it did, a session and a candidate: no other work changes counts."""

from __future__ import annotations

from slipstream.engine.factory import open_engine
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from slipstream.v1.verifier_pb2 import MISS_CAUSE_UNSPECIFIED
from tests.support.call_counts import ROOT_FOLDER, calls_of
from verifier_svc.acceptance.result import AcceptanceResult
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.rounds.round_result import RoundResult, StepTiming
from verifier_svc.session import Session, SessionRequest


def scheduled(executor: EmbeddedExecutor, number: int, candidates: int) -> ScheduledSequence:
    """A session that verifies a chain."""
    request = SessionRequest(
        id="",
        number=number,
        epoch=0,
        sampling=SamplingParams(temperature=0.0),
        prompt_length=1,
        max_length=64,
        stop_token_ids=frozenset(),
        max_draft_tokens=8,
    )
    session = Session(
        request,
        tokens=[7],
        credit=None,
        tree=CandidateTree([7]),
        history=None,
    )
    session.sequence = executor.kv.begin(session.tokens, session.request.cache_salt)
    executor.kv.grow(session.sequence, 1 + candidates)
    chain = Selection(
        token_ids=tuple(range(9, 9 + candidates)),
        parents=tuple(range(-1, candidates - 1)),
        depths=tuple(range(1, candidates + 1)),
        log_probs=(-0.5,) * candidates,
        path_log_probs=(-0.5,) * candidates,
        distributions=(None,) * candidates,
        sources=((1,),) * candidates,
    )
    return ScheduledSequence(session, 1, 0, session.tokens, complete=True, selection=chain)


def calls(executor: EmbeddedExecutor, sessions: int, candidates: int) -> int:
    """Python calls of the product's own functions in one step."""
    step = [scheduled(executor, number, candidates) for number in range(sessions)]
    return calls_of(lambda: executor.execute(step), "slipstream", "verifier_svc")


def test_a_step_makes_few_python_calls_for_each_session_and_candidate() -> None:
    executor = EmbeddedExecutor(open_engine(str(ROOT_FOLDER / "models" / "draft"), "float32", kv_tokens=8192))
    calls(executor, 1, 0)  # what is found out once
    alone, plain, guessed = (calls(executor, *shape) for shape in ((1, 0), (17, 0), (17, 8)))
    assert 50 < alone <= 150
    assert (plain - alone) / 16 <= 65, "calls for each further session"
    assert (guessed - plain) / 17 / 8 <= 3.0, "calls for each candidate"


def test_a_rounds_message_costs_the_same_whatever_the_number_of_candidates() -> None:
    executor = EmbeddedExecutor(open_engine("emulated:vocabulary=64&base_ms=0", kv_tokens=8192))

    def message(candidates: int) -> tuple[int, list[tuple[str, int, int]]]:
        turn = scheduled(executor, candidates, candidates)
        turn.session.name_source(1, "model")
        decided = AcceptanceResult((0,), 5)
        result = RoundResult(
            turn, decided, [9, 5], StepTiming(0.0, 0.0, 1.0, 0.0, 1, 1), 1, MISS_CAUSE_UNSPECIFIED, 0.0
        )
        shares = [(share.drafter, share.drafted, share.accepted) for share in result.message(0.1).drafters]
        return calls_of(lambda: result.message(0.1), "slipstream", "verifier_svc"), shares

    (few, one), (many, all_nodes) = message(1), message(8)
    assert one == [("model", 1, 1)] and all_nodes == [("model", 8, 1)]
    assert many == few <= 15
