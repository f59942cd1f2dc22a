"""What one more candidate is worth: where its source stands, as far as no other source's candidate is right there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.speculation.selection import ROOT
from verifier_svc.wait_policy.wait_policy import FIRST_ACCEPTANCE, ExpectedGain, WaitPolicy

LIMIT = 8


def expected(paths: Sequence[float], parents: Sequence[int], own: Sequence[bool], limit: int = LIMIT) -> ExpectedGain:
    return WaitPolicy[int](0.02, 1.0, lambda tokens, sessions: 0.01).expected_gain(1, paths, parents, own, limit)


def gain(paths: Sequence[float], parents: Sequence[int], own: Sequence[bool]) -> float:
    """Probability that the text gets where the candidate is expected, and further by none that is there."""
    return expected(paths, parents, own).gain / FIRST_ACCEPTANCE


def test_without_candidates_the_next_one_stands_on_the_root() -> None:
    assert gain([], [], []) == 1.0


def test_a_source_goes_on_below_its_likeliest_leaf() -> None:
    assert gain([0.9, 0.7, 0.2], [ROOT, 0, ROOT], [True] * 3) == pytest.approx(0.7)


def test_the_awaited_gain_excludes_candidates_that_another_source_sent() -> None:
    assert gain([0.3, 0.2], [ROOT, 0], [False, False]) == pytest.approx(0.7)
    assert gain([0.3, 0.1], [ROOT, ROOT], [False, False]) == pytest.approx(0.6)


def test_below_a_leaf_of_one_source_nodes_of_others_may_stand() -> None:
    assert gain([0.9, 0.5, 0.1], [ROOT, 0, 0], [True, False, False]) == pytest.approx(0.3)


def test_a_node_of_a_source_with_children_of_its_own_is_no_leaf() -> None:
    assert gain([0.9, 0.3, 0.2], [ROOT, 0, 0], [True, True, False]) == pytest.approx(0.3)


def test_a_full_step_loses_its_least_candidate_for_the_next_one() -> None:
    assert expected([0.5, 0.4], [ROOT, 0], [False, False], limit=2).cost == 0.4
    assert expected([0.5, 0.4], [ROOT, 0], [False, False], limit=3).cost == 0.0
    assert expected([0.5, 0.4, 0.3], [ROOT, 0], [False, False]).cost == 0.3, "the first that the step leaves out"


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 7), st.booleans()), max_size=8))
def test_no_gain_is_negative_nor_more_than_certain(nodes: list[tuple[float, int, bool]]) -> None:
    paths = sorted((path for path, _, _ in nodes), reverse=True)
    parents = [min(parent, place) - 1 for place, (_, parent, _) in enumerate(nodes)]
    assert 0.0 <= gain(paths, parents, [own for _, _, own in nodes]) <= 1.0
