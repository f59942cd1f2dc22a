"""Which guesses a verifier is told, and when."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.proposers.base import ROOT, ProposedNode
from slipstream.proposers.draft_tree import UNSENT, DraftNode
from slipstream.proposers.drafting.session import TOGETHER_S, URGENT, DraftPolicy, DraftSession
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.frame import Frame
from slipstream.speculation.sampling_params import SamplingParams

PROMPT = [3, 1, 2]


def new_session(max_nodes: int = 100, probability: float = 0.0, acceptance: str = "coupled") -> DraftSession:
    return DraftSession(
        1, SamplingParams(acceptance=acceptance), DraftPolicy(max_nodes, probability), list(PROMPT), 3, 1000
    )


def guess(session: DraftSession, token: int, probability: float, parent: DraftNode | None = None) -> DraftNode:
    parent = parent or session.tree.root
    session.join([parent], [ProposedNode(ROOT, token, math.log(probability))])
    return parent.children[token]


def tokens(nodes: list[DraftNode]) -> list[int]:
    return [node.token for node in nodes]


def test_candidates_that_a_step_may_await_are_sent_at_once_together_with_held_ones() -> None:
    session = new_session()
    guess(session, 7, URGENT / 2)
    assert session.take_nodes_to_send(0.0) == []
    guess(session, 5, URGENT * 1.01)
    assert tokens(session.take_nodes_to_send(TOGETHER_S / 2)) == [5, 7]


def test_candidates_that_are_not_urgent_are_sent_together_and_in_time() -> None:
    session = new_session()
    guess(session, 5, URGENT / 2)
    assert session.take_nodes_to_send(10.0) == []
    guess(session, 6, URGENT / 3)
    assert session.take_nodes_to_send(10.0 + TOGETHER_S * 0.9) == []
    assert tokens(session.take_nodes_to_send(10.0 + TOGETHER_S * 1.01)) == [5, 6]
    guess(session, 7, URGENT / 3)
    assert session.take_nodes_to_send(20.0) == []  # its own time begins


def test_an_idle_drafter_sends_held_candidates_at_once() -> None:
    session = new_session()
    guess(session, 5, URGENT / 2)
    assert tokens(session.take_nodes_to_send(0.0, idle=True)) == [5]
    assert session.take_nodes_to_send(0.0, idle=True) == []


def test_urgency_is_counted_from_the_present_root() -> None:
    session = new_session()
    first = guess(session, 5, 0.3)
    guess(session, 6, 0.4, first)
    assert tokens(session.take_nodes_to_send(0.0)) == [5, 6]
    guess(session, 7, 0.5, first)
    assert session.take_nodes_to_send(0.0) == []  # 0.15
    session.commit(3, [5])
    session.held_since = None
    assert tokens(session.take_nodes_to_send(0.0)) == [7]  # 0.5


def test_candidates_that_a_commit_makes_likely_are_sent_without_another_pass() -> None:
    session = new_session(probability=0.3)
    first = guess(session, 5, 0.5)
    guess(session, 6, 0.5, first)
    assert tokens(session.take_nodes_to_send(0.0, idle=True)) == [5]
    session.commit(3, [5])
    assert tokens(session.take_nodes_to_send(0.0, idle=True)) == [6]


def test_the_best_candidate_for_the_next_token_is_sent_however_unlikely_and_no_other_one() -> None:
    session = new_session(probability=0.5)
    first = guess(session, 5, 0.1)
    guess(session, 6, 0.05)
    guess(session, 7, 0.9, first)
    assert tokens(session.take_nodes_to_send(0.0, idle=True)) == [5]


@pytest.mark.parametrize("max_nodes", [0, 1, 3])
def test_no_more_candidates_are_sent_than_the_policy_allows_and_the_likeliest_first(max_nodes: int) -> None:
    session = new_session(max_nodes)
    for token in range(5):
        guess(session, token, 0.05 + 0.01 * token)
    assert tokens(session.take_nodes_to_send(0.0, idle=True)) == [4, 3, 2][:max_nodes]
    assert session.take_nodes_to_send(1.0, idle=True) == []
    session.policy = DraftPolicy(max_nodes + 1, 0.0)
    assert tokens(session.take_nodes_to_send(1.0, idle=True)) == [4 - max_nodes]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["guess", "guess", "tell", "commit", "policy"]), st.integers(0, 10_000)), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_whatever_happens_a_verifier_can_hold_what_it_is_sent_and_no_likely_candidate_waits_long(
    events: list[tuple[str, int]],
) -> None:
    session, receiver = new_session(12, 0.1), CandidateTree(PROMPT)
    now, held = 0.0, None
    for kind, number in events:
        dice = random.Random(number)
        if kind == "guess":
            parent = dice.choice([session.tree.root, *session.tree.nodes()])
            proposed = [ProposedNode(ROOT, dice.randrange(4), math.log(dice.uniform(0.02, 1.0))) for _ in range(3)]
            session.join([parent], proposed)
        elif kind == "commit":
            inside = [node.token for node in session.tree.root.children.values()] or [0]
            token = dice.choice([*inside, 9])
            session.commit(len(session.tokens), [token])
            receiver.commit([token])
        elif kind == "policy":
            session.policy = DraftPolicy(dice.choice([0, 4, 12]), dice.choice([0.05, 0.1, 0.5]))
        else:
            now += dice.choice([0.0, TOGETHER_S / 2, TOGETHER_S * 2])
            held = _received(session, receiver, session.take_nodes_to_send(now), now, held)


def _received(
    session: DraftSession, receiver: CandidateTree, told: list[DraftNode], now: float, held: float | None
) -> float | None:
    """Checks what was told, and what was not. Returns since when something worthy is held back."""
    tree, policy = session.tree, session.policy
    if told:
        assert all(node.parent is not None and node.parent.number < node.number for node in told)
        assert tree.sent_count <= policy.max_nodes
        frame = Frame(
            tree.base_length,
            tree.generation,
            told[0].number,
            tuple(tokens(told)),
            tuple(node.log_prob for node in told),
            tuple(node.parent.number for node in told if node.parent is not None),
        )
        assert receiver.graft(frame).added == len(told)
    for node in told:
        probability = math.exp(node.path_log_prob - tree.root.path_log_prob)
        assert probability >= policy.min_path_probability * 0.999 or node is tree.favourite
    worthy = [
        node
        for node in tree.nodes()
        if node.number == UNSENT
        and math.exp(node.path_log_prob - tree.root.path_log_prob) >= policy.min_path_probability * 1.001
    ]
    if not worthy or told or tree.sent_count >= policy.max_nodes:
        assert not told or not worthy or tree.sent_count >= policy.max_nodes
        return None
    assert all(math.exp(node.path_log_prob - tree.root.path_log_prob) < URGENT * 1.001 for node in worthy)
    assert held is None or now - held < TOGETHER_S
    return now if held is None else held


# The ratio rules: what is told, and in which order, must not depend on what was drawn.

SHAPES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 3)), min_size=1, max_size=15)
"""Passes: which node was asked, how many children were drawn below it."""
VALUES = st.lists(
    st.tuples(st.permutations(range(5)), st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3)),
    min_size=15,
    max_size=15,
)
"""For each pass the tokens that were drawn and their probabilities."""
Values = list[tuple[list[int], list[float]]]


def drawn(shape: list[tuple[int, int]], values: Values, probability: float) -> list[tuple[int, int]]:
    """(number, parent's number) of all that was told, in order."""
    session = new_session(8, probability, "rejection")
    places = [session.tree.root]
    record: list[tuple[int, int]] = []
    for (pick, count), (drawn_tokens, shares) in zip(shape, values, strict=False):
        start = places[pick % len(places)]
        if start.expanded:
            continue
        start.expanded = True
        q = DraftDistribution(tuple(range(5)), (1,) * 5)
        session.join([start], [ProposedNode(ROOT, drawn_tokens[i], math.log(shares[i]), q) for i in range(count)])
        assert start.expanded == bool(start.children)  # what found no room is asked again
        told = session.take_nodes_to_send(0.0)
        record += [(node.number, node.parent.number) for node in told if node.parent is not None]
        places += told
    assert session.tree.sent_count == session.tree.node_count == len(record) <= 8
    return record


@settings(max_examples=200, deadline=None)
@given(SHAPES, VALUES, VALUES, st.sampled_from([0.0, 0.5, 0.99]))
def test_draws_for_a_ratio_rule_are_sent_at_once_in_order_whatever_was_drawn(
    shape: list[tuple[int, int]], values: Values, others: Values, probability: float
) -> None:
    record = drawn(shape, values, probability)
    assert record == drawn(shape, others, 0.0)
    assert [number for number, _ in record] == list(range(1, len(record) + 1))
