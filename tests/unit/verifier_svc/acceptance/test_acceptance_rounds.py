"""The rules through several rounds with the real trees on both sides: whatever the schedule, the text's law is
the target's. All randomness is enumerated, with what keys share (`tests/support/enumerated_rounds.py`).
"""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.proposers.base import ProposedNode, ProposerContext
from slipstream.proposers.draft_tree import DraftNode, DraftTree
from slipstream.proposers.drafting.session import DraftSession as Drafting
from slipstream.speculation import noise
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.noise import Purpose
from tests.support.enumerated_rounds import SEED, Keying, Round, World, by_node, law
from tests.support.enumeration import draft_of, error, target_of

RULES = ("coupled", "rejection")
"""The last one is a deprecated name of `rejection`."""


def bias(world: World) -> float:
    return error(world.target, law(world), world.tokens)


def world(rule: str, *rounds: Round, seed: int = 3, tokens: int = 3, **options: object) -> World:
    """With two drafters that differ. Two tokens for long texts; three where fewer are looked at."""
    vocabulary = 2 if tokens > 2 else 3
    drafts = [draft_of(seed + number, vocabulary, vocabulary) for number in (1, 2)]
    return World(rule, target_of(seed, vocabulary), drafts, rounds, tokens, **options)  # type: ignore[arg-type]


SCHEDULES = st.lists(
    st.builds(
        Round,
        passes=st.integers(0, 2),
        meanwhile=st.integers(0, 1),
        budget=st.integers(0, 3),
        late_commits=st.booleans(),
        crossing=st.booleans(),
        late_frames=st.booleans(),
        waits=st.booleans(),
        reopens=st.booleans(),
        rolls_back_to=st.sampled_from([None, None, 1, 2]),
    ),
    min_size=1,
    max_size=3,
).filter(lambda rounds: 0 < sum(now.passes + now.meanwhile for now in rounds) <= 4)


@settings(deadline=None, max_examples=20)
@given(
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 10**6),
    rounds=SCHEDULES,
    max_nodes=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.4]),
)
def test_the_law_of_the_text_is_the_targets_under_any_schedule(
    rule: str, seed: int, rounds: list[Round], max_nodes: int, least: float
) -> None:
    """Working ahead, cut by the budget, by the drafter's bounds and by its doubts; late, crossing, waited for,
    reopened, rolled back."""
    assert bias(world(rule, *rounds, seed=seed, max_nodes=max_nodes, least=least, expand=1)) < 1e-12


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_siblings_among_three_tokens_and_several_nodes_at_a_time(budget: int) -> None:
    """The budget cuts families in the middle; what it leaves is judged in the next round where it lives on."""
    rounds = Round(passes=2, budget=budget), Round(passes=0, budget=4)
    assert bias(world("rejection", *rounds, tokens=2, max_nodes=3)) < 1e-12


AHEAD = Round(passes=3, budget=2), Round(passes=1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_drafter_may_work_rounds_ahead(rule: str, ahead: int) -> None:
    rounds = Round(passes=1 + ahead, budget=1), Round(passes=0, budget=1), Round(passes=1, budget=2)
    assert bias(world(rule, *rounds, width=1)) < 1e-12


def by_position(session: Drafting, context: ProposerContext, index: int) -> int:
    return noise.key(SEED, context.length + len(context.path(context.expand[index])), Purpose.DRAFT)


def by_base(session: Drafting, context: ProposerContext, index: int) -> int:
    base = noise.key(SEED, session.tree.base_length, Purpose.DRAFT)
    return noise.key(base, context.noise_nodes[index], Purpose.DRAFT)


REPLACED = Round(passes=2, meanwhile=2, budget=2, reopens=True), Round(passes=0, budget=2)


@pytest.mark.parametrize("keying", [by_node, by_position, by_base])
@pytest.mark.parametrize("rounds", [AHEAD, REPLACED], ids=["new generation", "new drafter"])
@pytest.mark.parametrize("options", [{}, {"width": 1}, {"tokens": 2, "max_nodes": 2}], ids=["", "chains", "three"])
def test_generations_and_openings_may_share_noise(
    keying: Keying, rounds: tuple[Round, ...], options: dict[str, int]
) -> None:
    """The rule looks no further than it goes: draws beyond the token that ends a round are still fresh in the next. A
    drafter that takes another one's place while a step runs begins on as many tokens as the generation in it."""
    assert bias(world("rejection", *rounds, keying=keying, **options)) < 1e-12


# What would be wrong.


def test_siblings_must_not_be_dropped_for_what_they_are() -> None:
    """As the coupled rule's growth may do it: what finds no room is what is unlikely."""
    rounds = Round(passes=1, budget=2), Round(passes=0)
    fits = world("rejection", *rounds, tokens=2, max_nodes=1)
    assert bias(fits) < 1e-12
    in_order = DraftTree.join_drawn

    def likeliest_first(tree: DraftTree, places: list[DraftNode], proposed: list[ProposedNode], most: int) -> None:
        in_order(tree, places, sorted(proposed, key=lambda node: -node.log_prob), most)

    with mock.patch.object(DraftTree, "join_drawn", likeliest_first):
        assert bias(fits) > 1e-3


def test_a_selection_must_not_prefer_the_likely() -> None:
    cut = world("rejection", Round(passes=1, budget=1), Round(passes=0, budget=1), tokens=2)
    assert bias(cut) < 1e-12
    with mock.patch.object(CandidateTree, "select_first_created", CandidateTree.select_likeliest):
        assert bias(cut) > 1e-3
