"""What is believed of a drafter's speed."""

from __future__ import annotations

import pytest

from verifier_svc.pace import PATIENCE, WEIGHT, Average, Pace


def test_the_first_sample_is_the_average_and_later_ones_move_it_by_their_weight() -> None:
    average = Average()
    average.add(4.0)
    assert average.value == 4.0
    average.add(9.0)
    assert average.value == pytest.approx(4.0 + WEIGHT * 5.0)


def test_nothing_is_expected_of_a_drafter_that_was_never_measured() -> None:
    pace = Pace(Average(), Average(0.5))
    assert pace.expected_s(10.0, 9.0, fresh=True) is None
    assert pace.expected_s(10.0, 9.9, fresh=False) == pytest.approx(0.4)


def test_what_is_late_is_believed_in_for_a_while_and_then_no_more() -> None:
    pace = Pace(Average(1.0), Average())
    assert pace.expected_s(0.25, 0.0, fresh=True) == 0.75
    assert pace.expected_s(1.5, 0.0, fresh=True) == 0.0
    assert pace.expected_s(PATIENCE, 0.0, fresh=True) is None


def test_a_first_candidate_and_the_next_of_a_chain_have_their_own_pace() -> None:
    pace = Pace(Average(2.0), Average(0.1))
    assert pace.expected_s(0.0, 0.0, fresh=True) == 2.0
    assert pace.expected_s(0.0, 0.0, fresh=False) == 0.1
