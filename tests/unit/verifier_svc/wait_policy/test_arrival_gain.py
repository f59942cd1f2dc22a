"""What waiting brings is learned from what it brought."""

from __future__ import annotations

import pytest

from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.session import Session
from verifier_svc.wait_policy.arrival_gain import LEAST, MOST, ArrivalGains, ExpectedGain


def new_session(number: int) -> Session:
    return Session(
        id=str(number),
        number=number,
        epoch=1,
        sampling=SamplingParams(temperature=0.0),
        tokens=[1],
        prompt_length=1,
        max_length=99,
        stop_token_ids=frozenset(),
        max_draft_tokens=8,
        credit=None,
        tree=CandidateTree([1]),
        history=TokenHistory([1]),
        say=lambda reply: None,
    )


SESSION, OTHER = new_session(1), new_session(2)


def waited(promise: ArrivalGains, worth: float, gain: float, times: int = 100) -> None:
    """Waits that hope for `gain`, after which candidates came that are worth so much."""
    for _ in range(times):
        promise.wait({SESSION: ExpectedGain(1, 0.5, gain)})
        promise.look({SESSION: ExpectedGain(2, 0.5 + worth, 0.1)})


def test_at_first_one_candidate_is_believed_to_come() -> None:
    assert ArrivalGains().ratio == 1.0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 2.5])
def test_the_ratio_is_what_came_over_what_was_hoped_for(share: float) -> None:
    promise = ArrivalGains()
    waited(promise, 0.4 * share, 0.4)
    assert promise.ratio == pytest.approx(max(LEAST, share), abs=1e-6)


def test_where_nothing_came_nothing_is_learned() -> None:
    promise = ArrivalGains()
    promise.wait({SESSION: ExpectedGain(1, 0.5, 0.4), OTHER: ExpectedGain(1, 0.0, 0.9)})
    promise.look({SESSION: ExpectedGain(1, 0.9, 0.4), OTHER: ExpectedGain(1, 0.0, 0.9)})
    assert promise.ratio == 1.0


def test_only_the_sessions_on_which_something_came_count() -> None:
    promise = ArrivalGains()
    for _ in range(100):
        promise.wait({SESSION: ExpectedGain(1, 0.0, 0.5), OTHER: ExpectedGain(1, 0.0, 0.5)})
        promise.look({SESSION: ExpectedGain(2, 1.0, 0.5), OTHER: ExpectedGain(1, 0.0, 0.5)})
    assert promise.ratio == pytest.approx(2.0)


def test_a_step_that_did_not_wait_teaches_nothing() -> None:
    promise = ArrivalGains()
    promise.wait({SESSION: ExpectedGain(1, 0.0, 0.5)})
    promise.look({SESSION: ExpectedGain(2, 0.5, 0.5)})
    promise.look({SESSION: ExpectedGain(9, 7.0, 0.5)})
    assert promise.ratio == 1.0


def test_accidents_are_bounded() -> None:
    promise = ArrivalGains()
    waited(promise, 500.0, 0.001)
    assert promise.ratio == pytest.approx(MOST)
    waited(promise, -1.0, 0.4)
    assert promise.ratio == LEAST
