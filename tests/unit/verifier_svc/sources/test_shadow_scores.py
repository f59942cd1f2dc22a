"""What a shadow's candidates would have brought, against a walk through the whole text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.frame import Frame
from slipstream.speculation.selection import ROOT
from slipstream.v1 import types_pb2, verifier_pb2
from tests.support.verifier_sessions import Sent, new_session
from verifier_svc.estimators.calibration import Calibration
from verifier_svc.session import Session
from verifier_svc.sources.shadow import ShadowDrafter

PROMPT = [9, 9]
STOP = 7
TOKENS = st.integers(0, 2)
LIMIT = 6


def session(**changes: Any) -> Session:
    fields: dict[str, Any] = {"max_length": 1000, "stop_token_ids": frozenset([STOP]), "max_draft_tokens": LIMIT}
    return new_session(PROMPT, **fields | changes)


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int, float]]:
    """Token, parent and probability of each node; 0 is the root."""
    size = draw(st.integers(0, 10))
    return [(draw(TOKENS), draw(st.integers(0, node)), draw(st.sampled_from([0.3, 0.6, 0.9]))) for node in range(size)]


def grown(shadow: ShadowDrafter, nodes: list[tuple[int, int, float]], generation: int) -> None:
    """The shadow guesses anew on what is committed."""
    shadow.double.tree.graft(
        Frame(
            base_length=len(shadow.double.tokens),
            generation=generation,
            first_node=1,
            token_ids=tuple(token for token, _, _ in nodes),
            log_probs=tuple(math.log(share) for _, _, share in nodes),
            parents=tuple(parent for _, parent, _ in nodes),
        )
    )


def longest(tree: CandidateTree, limit: int, text: list[int]) -> int:
    """Of the text's beginning, as far as the likeliest candidates have it."""
    chosen, node = tree.select_likeliest(limit), ROOT
    for depth, token in enumerate(text):
        child = chosen.child(node, token)
        if child is None:
            return depth
        node = child
    return len(text)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=4), trees(), st.booleans()), min_size=1, max_size=8))
def test_scores_are_those_of_the_whole_text_however_it_is_committed(
    steps: list[tuple[list[int], list[tuple[int, int, float]], bool]],
) -> None:
    """Rounds do not overlap, and begin with the first step at or behind the end of the one before."""
    text = [*(token for tokens, _, _ in steps for token in tokens), STOP]
    shadow, calibration, at, begins = ShadowDrafter(session(), "new"), Calibration(lambda: 0.0), 0, 0
    expected: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []
    for number, (tokens, nodes, fresh) in enumerate([*steps, ([STOP], [], False)]):
        if fresh:
            grown(shadow, nodes, number)
        if at >= begins:
            tree = shadow.double.tree
            accepted = longest(tree, LIMIT, text[at:])
            expected.append((len(tree.select_likeliest(LIMIT)), accepted))
            begins = at + accepted + 1
        shadow.look(LIMIT, 0.0, calibration)
        at += len(tokens)
        if (score := shadow.commit(tokens, calibration)) is not None:
            assert score.drafter == "new"
            told.append((score.drafted, score.accepted))
    assert told == expected
    assert shadow.double.tokens == PROMPT + text


def test_a_round_goes_on_where_the_step_s_own_tokens_end() -> None:
    """Plain decoding goes through what the shadow knew, one token a step: that is one round of the shadow's."""
    shadow, calibration = ShadowDrafter(session(), "new"), Calibration(lambda: 0.0)
    grown(shadow, [(token, parent, 0.9) for parent, token in enumerate([1, 2, 3, 4])], 0)
    told = []
    for token in (1, 2, 3, 9, 9):
        shadow.look(LIMIT, 0.0, calibration)
        score = shadow.commit([token], calibration)
        told.append(score and (score.drafted, score.accepted))
    assert told == [None, None, None, (4, 3), (0, 0)]


@pytest.mark.parametrize(("ending", "text"), [({"max_length": len(PROMPT) + 2}, [1, 2]), ({}, [1, STOP])])
def test_the_last_round_is_scored_although_the_text_ends_inside_it(ending: dict[str, int], text: list[int]) -> None:
    shadow, calibration = ShadowDrafter(session(**ending), "new"), Calibration(lambda: 0.0)
    grown(shadow, [(token, parent, 0.9) for parent, token in enumerate([*text, 3, 4])], 0)
    shadow.look(LIMIT, 0.0, calibration)
    score = shadow.commit(text, calibration)
    assert score is not None and (score.drafted, score.accepted) == (4, 2)


@pytest.mark.parametrize(("price", "drafted"), [(0.0, 3), (0.5, 2), (0.95, 0)])
def test_candidates_that_would_not_have_paid_are_not_counted(price: float, drafted: int) -> None:
    shadow, calibration = ShadowDrafter(session(), "new"), Calibration(lambda: 0.0)
    grown(shadow, [(1, 0, 0.9), (2, 1, 0.7), (3, 2, 0.4)], 0)
    shadow.look(LIMIT, price, calibration)
    score = shadow.commit([0], calibration)
    assert score is not None and (score.drafted, score.accepted) == (drafted, 0)


def test_accepted_tokens_calibrate_the_confidence_of_a_shadow() -> None:
    shadow, calibration = ShadowDrafter(session(), "new"), Calibration(lambda: 0.0)
    for number in range(60):
        grown(shadow, [(1, 0, 0.9)], number)
        shadow.look(LIMIT, 0.5, calibration)
        shadow.commit([2], calibration)
    grown(shadow, [(1, 0, 0.9)], 60)
    shadow.look(LIMIT, 0.5, calibration)
    score = shadow.commit([1], calibration)
    assert score is not None and score.drafted == 0  # it was wrong too often to be taken


def test_the_double_of_a_session_for_a_shadow_shares_no_state_with_it() -> None:
    told: list[Any] = []
    served = session(stream=Sent(told.append))
    double = ShadowDrafter(served, "new").double
    double.name_source(3, "new")
    double.commit([1])
    double.request.stream.send(verifier_pb2.DrafterEvent(failure=types_pb2.Failure(message="lost")))
    assert served.tokens == PROMPT and served.tree.base_length == len(PROMPT) and served.drafters_of((3,)) == ("",)
    assert not told and served.served and not double.served
