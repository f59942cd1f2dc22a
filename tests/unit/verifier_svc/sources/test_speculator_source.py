"""vLLM's own speculator as a source: which of its draft tokens join a session's tree, and when it is asked for any."""

from __future__ import annotations

import math

import pytest

from slipstream.speculation.frame import Frame
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2, verifier_pb2
from tests.support.verifier_sessions import Sent, new_session
from verifier_svc.draft_feed import DraftFeed, StepDraft
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.speculator import SpeculatorSource
from verifier_svc.wait_policy.draft_threshold import PAUSE

ADDRESS = "verifier:speculator"
SURE = -0.1


def opened(feed: DraftFeed, *sessions: Session) -> CandidateSources:
    sources = CandidateSources(types_pb2.ModelInfo(vocabulary_size=100), 0.02)
    sources.add_local(SpeculatorSource(feed, sources.context))
    for session in sessions:
        sources.attach_session(session, [verifier_pb2.DrafterAddress(address=ADDRESS, name="head")])
    return sources


def chain(session: Session) -> tuple[int, ...]:
    return session.tree.select_likeliest_chain(8).token_ids


def test_a_step_s_draft_joins_the_tree_and_the_next_one_takes_its_place() -> None:
    feed, session = DraftFeed(), new_session([1, 2])
    sources = opened(feed, session)
    assert feed.wanted([session])
    feed.deliver(session, StepDraft(2, [5, 6, 7], [SURE] * 3))
    sources.collect()
    assert chain(session) == (5, 6, 7)
    assert session.source_label(session.tree.select_likeliest_chain(1).sources[0]) == "head"
    session.commit([5], 2)
    assert chain(session) == (6, 7)
    feed.deliver(session, StepDraft(3, [8, 9], [SURE] * 2))
    sources.collect()
    assert chain(session) == (8, 9) and session.tree.node_count == 2


def test_it_merges_with_what_another_source_sent() -> None:
    feed, session = DraftFeed(), new_session([1])
    sources = opened(feed, session)
    other = 50
    session.name_source(other, "lookup")
    session.tree.graft(Frame(1, 1, 1, (5, 6), (SURE, SURE), source=other))
    feed.deliver(session, StepDraft(1, [5, 7], [SURE, -3.0]))
    sources.collect()
    chosen = session.tree.select_likeliest_chain(8)
    assert chosen.token_ids == (5, 6) and session.tree.node_count == 3
    assert [session.source_label(each) for each in chosen.sources] == ["head+lookup", "lookup"]


@pytest.mark.parametrize("base", [2, 4])
def test_a_draft_on_other_tokens_than_were_kept_is_left(base: int) -> None:
    """As of a step whose last tokens stood behind a stop token, or that ran before a rollback."""
    feed, session = DraftFeed(), new_session([1, 2, 3])
    sources = opened(feed, session)
    feed.deliver(session, StepDraft(base, [5], [SURE]))
    sources.collect()
    assert session.tree.empty and not sources.context.dropped


def test_a_chain_ends_where_its_numbers_are_broken() -> None:
    feed, session = DraftFeed(), new_session([1])
    sources = opened(feed, session)
    feed.deliver(session, StepDraft(1, [5, 6, 7], [SURE, math.nan, SURE]))
    sources.collect()
    assert chain(session) == (5,)


def test_a_token_outside_the_vocabulary_costs_the_session_its_head() -> None:
    events: list[verifier_pb2.DrafterEvent] = []
    feed, session = DraftFeed(), new_session([1], stream=Sent(events.append))
    sources = opened(feed, session)
    feed.deliver(session, StepDraft(1, [100], [SURE]))
    sources.collect()
    assert session.tree.empty and not sources.has_source(session)
    assert [event.drafter for event in events if event.HasField("failure")] == ["head"]
    feed.deliver(session, StepDraft(1, [5], [SURE]))
    assert not feed.take()


def test_no_candidates_are_requested_while_no_session_drafts() -> None:
    feed, one, other, stranger = DraftFeed(), new_session([1]), new_session([1], max_draft_tokens=0), new_session([1])
    sources = opened(feed, one, other)
    assert feed.wanted([one, other]) and not feed.wanted([other, stranger])
    sources.set_threshold(PAUSE)
    assert not feed.wanted([one])
    sources.set_threshold(0.02)
    assert feed.wanted([one])
    sources.detach_session(one)
    assert not feed.wanted([one])


def test_a_session_under_a_ratio_rule_has_no_use_for_it() -> None:
    events: list[verifier_pb2.DrafterEvent] = []
    drawn = SamplingParams(temperature=1.0, acceptance="rejection")
    session = new_session([1], sampling=drawn, stream=Sent(events.append))
    sources = opened(DraftFeed(), session)
    assert not sources.has_source(session)
    assert [event.failure.reason for event in events] == ["NO_DISTRIBUTION"]


def test_a_verifier_without_it_names_the_setting() -> None:
    events: list[verifier_pb2.DrafterEvent] = []
    sources = CandidateSources(types_pb2.ModelInfo(vocabulary_size=100), 0.02)
    session = new_session([1], stream=Sent(events.append))
    sources.attach_session(session, [verifier_pb2.DrafterAddress(address=ADDRESS, name="head")])
    assert ["VERIFIER_VLLM_SPECULATOR" in event.failure.message for event in events] == [True]
