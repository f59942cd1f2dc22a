"""What waiting brings is learned from what it brought."""

from __future__ import annotations

import pytest

from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.session import Session, SessionRequest
from verifier_svc.wait_policy.wait_policy import MAX_GAIN_RATIO, MIN_GAIN_RATIO, ExpectedGain, GainRatio


def new_session(number: int) -> Session:
    request = SessionRequest(
        id=str(number),
        number=number,
        epoch=1,
        sampling=SamplingParams(temperature=0.0),
        prompt_length=1,
        max_length=99,
        stop_token_ids=frozenset(),
        max_draft_tokens=8,
    )
    return Session(
        request,
        tokens=[1],
        credit=None,
        tree=CandidateTree([1]),
        history=TokenHistory([1]),
    )


SESSION, OTHER = new_session(1), new_session(2)


def waited(learned: GainRatio, worth: float, gain: float, times: int = 100) -> None:
    """Waits that hope for `gain`, after which candidates came that are worth so much."""
    for _ in range(times):
        learned.start_wait({SESSION: ExpectedGain(1, 0.5, gain)})
        learned.observe({SESSION: ExpectedGain(2, 0.5 + worth, 0.1)})


def test_the_gain_ratio_is_one_before_any_wait() -> None:
    assert GainRatio().value == 1.0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 2.5])
def test_the_gain_ratio_is_the_observed_gain_over_the_expected_gain(share: float) -> None:
    learned = GainRatio()
    waited(learned, 0.4 * share, 0.4)
    assert learned.value == pytest.approx(max(MIN_GAIN_RATIO, share), abs=1e-6)


def test_a_wait_in_which_nothing_arrived_changes_no_estimate() -> None:
    learned = GainRatio()
    learned.start_wait({SESSION: ExpectedGain(1, 0.5, 0.4), OTHER: ExpectedGain(1, 0.0, 0.9)})
    learned.observe({SESSION: ExpectedGain(1, 0.9, 0.4), OTHER: ExpectedGain(1, 0.0, 0.9)})
    assert learned.value == 1.0


def test_only_sessions_whose_candidates_arrived_change_the_gain_ratio() -> None:
    learned = GainRatio()
    for _ in range(100):
        learned.start_wait({SESSION: ExpectedGain(1, 0.0, 0.5), OTHER: ExpectedGain(1, 0.0, 0.5)})
        learned.observe({SESSION: ExpectedGain(2, 1.0, 0.5), OTHER: ExpectedGain(1, 0.0, 0.5)})
    assert learned.value == pytest.approx(2.0)


def test_a_step_that_did_not_wait_changes_no_estimate() -> None:
    learned = GainRatio()
    learned.start_wait({SESSION: ExpectedGain(1, 0.0, 0.5)})
    learned.observe({SESSION: ExpectedGain(2, 0.5, 0.5)})
    learned.observe({SESSION: ExpectedGain(9, 7.0, 0.5)})
    assert learned.value == 1.0


def test_outliers_leave_the_gain_ratio_within_its_bounds() -> None:
    learned = GainRatio()
    waited(learned, 500.0, 0.001)
    assert learned.value == pytest.approx(MAX_GAIN_RATIO)
    waited(learned, -1.0, 0.4)
    assert learned.value == MIN_GAIN_RATIO
