"""What is awaited of a source depends on its own candidates, whatever other sources put into the session's tree."""

from __future__ import annotations

from slipstream.speculation.frame import Frame
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.source import Attachment
from verifier_svc.wait_policy.arrival_times import ArrivalTimes

MODEL, LOOKUP = 1, 2


def chain(base: int, *tokens: int, source: int) -> Frame:
    return Frame(base, 0, 1, tokens, (-0.1,) * len(tokens), source=source)


def test_candidates_of_another_source_do_not_count_as_awaited_ones() -> None:
    session = new_session([1, 2, 3], max_draft_tokens=2)
    model = Attachment(session, ArrivalTimes(), "model", MODEL, since=0.0)
    session.tree.graft(chain(3, 7, source=MODEL))
    model.candidates_came(0.1)
    assert model.delays is model.arrival_times.few
    session.tree.graft(chain(3, 8, 9, 6, source=LOOKUP))
    model.root_moved(0.2, awaited=True)
    assert model.delays is model.arrival_times.few, "it has one candidate of two, whatever the lookup has"
    session.tree.commit([8])
    model.root_moved(0.3, awaited=True)
    assert not session.tree.empty and model.delays is model.arrival_times.first, "its own tree was left"


def test_candidates_that_another_source_sent_first_count_as_an_answer_too() -> None:
    session = new_session([1, 2, 3], max_draft_tokens=2)
    context = CandidateSources(types_pb2.ModelInfo(), 0.0).context
    assert context.graft(session, chain(3, 7, 8, source=LOOKUP)) == 2
    assert context.graft(session, chain(3, 7, source=MODEL)) == 1
    session.tree.commit([7])
    assert context.graft(session, chain(2, 3, 7, source=3)) == 0, "committed: nothing that a step could take"
