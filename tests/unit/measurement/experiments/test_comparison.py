"""What is said of arms, on sessions whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from measurement.experiments.comparison import (
    ComparedLine,
    Prices,
    compare,
    cost,
    measured,
    number,
    reached,
    shadows,
    uneven,
)
from measurement.experiments.estimates import Interval
from slipstream.v1 import gateway_pb2

PRICES = Prices(verifier=3.6, drafter=0.36)


def arm(name: str, sessions: int, rate: float, tpot_s: float, seed: int, **more: float) -> gateway_pb2.ExperimentArm:
    """`more`: shadows, and how often they are right."""
    chance = np.random.default_rng(seed)
    samples = []
    for index in range(sessions):
        rounds, tokens = 50, int(chance.integers(2, 200))
        accepted = int(chance.binomial(4 * rounds, rate))
        shadow = {name: drafts(rounds, int(chance.binomial(4 * rounds, right))) for name, right in more.items()}
        samples.append(
            gateway_pb2.SessionSample(
                priority=index,
                tokens=tokens,
                served=drafts(rounds, accepted),
                shadows=shadow,
                ttft_s=0.2,
                e2e_s=0.2 + (tokens - 1) * tpot_s * chance.uniform(0.9, 1.1),
                verifier_s=tokens * 0.002,
                drafter_s=tokens * 0.01,
            )
        )
    return gateway_pb2.ExperimentArm(name=name, begun=sessions, finished=sessions, samples=samples)


def drafts(rounds: int, accepted: int) -> gateway_pb2.DraftSample:
    return gateway_pb2.DraftSample(
        rounds=rounds, rounds_with_drafts=rounds, drafted=4 * rounds, accepted=accepted, reached=[rounds // 2, 10]
    )


def told(*arms: gateway_pb2.ExperimentArm, setting: str = "old: 1; new: 1") -> gateway_pb2.GetExperimentResponse:
    return gateway_pb2.GetExperimentResponse(name="trial", arms_setting=setting, arms=arms)


def lines(found: list[ComparedLine]) -> dict[str, ComparedLine]:
    return {line.metric.name: line for line in found}


def test_a_better_arm_is_reported_as_better_by_each_metric_in_which_it_is() -> None:
    found = lines(compare([arm("old", 200, 0.5, 0.020, 1), arm("new", 100, 0.6, 0.015, 2)], PRICES)["new"])
    assert found["acceptance rate"].conclusion("new").startswith("new is better by 0.0")
    assert found["acceptance length"].difference.value == pytest.approx(0.4, abs=0.05)
    assert found["tokens a round"].second.value == pytest.approx(1 + 4 * 0.6, abs=0.05)
    for name in ("TPOT mean", "TPOT p50", "TPOT p95"):
        assert found[name].conclusion("new").startswith("new is better by 4") or "by 5" in found[name].conclusion("new")
        assert found[name].difference.high < 0.0
    assert found["TTFT mean"].conclusion("new") == "no difference shown (0 to 0)"
    assert found["cost of 1M tokens"].conclusion("new").startswith("no difference shown")
    worse = lines(compare([arm("new", 100, 0.6, 0.015, 2), arm("old", 200, 0.5, 0.020, 1)])["old"])
    assert worse["TPOT mean"].conclusion("old").startswith("old is worse by")


def test_costs_are_seconds_times_prices() -> None:
    """2 ms of a verifier and 10 ms of drafters a token."""
    own = measured(arm("old", 20, 0.5, 0.02, 1).samples)
    assert cost(own, PRICES).sum() / own.tokens.sum() * 1e6 == pytest.approx(2.0 + 1.0)
    found = lines(compare([arm("old", 20, 0.5, 0.02, 1)], PRICES)["old"])
    assert found["cost of 1M tokens"].first.value == pytest.approx(3.0)
    assert "cost of 1M tokens" not in lines(compare([arm("old", 20, 0.5, 0.02, 1)])["old"])


def test_arms_that_are_alike_are_seldom_called_different() -> None:
    """Over 14 metrics of 30 experiments; metrics go together, so the share varies more than it would alone."""
    verdicts = [
        line.conclusion("b")
        for seed in range(30)
        for line in compare([arm("a", 80, 0.5, 0.02, seed), arm("b", 60, 0.5, 0.02, 1000 + seed)])["b"]
    ]
    shown = sum("difference shown" not in verdict and "few" not in verdict for verdict in verdicts)
    assert shown / len(verdicts) < 0.08


def test_a_few_sessions_are_too_few() -> None:
    found = lines(compare([arm("old", 9, 0.5, 0.02, 1), arm("new", 30, 0.9, 0.01, 2)])["new"])
    assert {found[name].conclusion("new") for name in ("acceptance rate", "TPOT mean", "TPOT p95")} == {
        "too few sessions"
    }
    assert compare([arm("old", 0, 0.5, 0.02, 1)])["old"][0].conclusion("old") == "too few sessions"


def test_a_shadow_is_compared_with_the_drafter_that_served_the_same_sessions() -> None:
    watched = arm("old", 60, 0.5, 0.02, 1, new=0.55)
    watched.samples.extend(arm("old", 500, 0.99, 0.02, 5).samples)  # sessions that it did not see
    found = lines(shadows(watched)["new"])
    assert found["acceptance rate"].first.value == pytest.approx(0.5, abs=0.01)
    assert found["acceptance rate"].conclusion("new").startswith("new is better by 0.0")
    assert set(found) == {"acceptance rate", "acceptance length", "tokens a round"}
    assert reached(watched.samples[:60], "new") == [0.5, 0.2]


@pytest.mark.parametrize(("begun", "odd"), [((8000, 2000), 0), ((7880, 2120), 0), ((7800, 2200), 2), ((0, 40), 2)])
def test_arms_whose_sessions_do_not_match_their_weights_are_reported(begun: tuple[int, int], odd: int) -> None:
    arms = [gateway_pb2.ExperimentArm(name=name, begun=n) for name, n in zip(("old", "new"), begun, strict=True)]
    assert len(uneven(told(*arms, setting="old: 80 drafters=model; new: 20 drafters=suffix"))) == odd


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.51234, "0.512"), (-0.0312, "-0.0312"), (12.345, "12.3"), (4321.0, "4321"), (1e-9, "0.000000")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_difference_whose_interval_touches_zero_is_not_shown() -> None:
    metric: Any = compare([arm("old", 20, 0.5, 0.02, 1)])["old"][0].metric
    line = ComparedLine(metric, Interval(1.0, 0.9, 1.1), Interval(1.1, 1.0, 1.2), Interval(0.1, 0.0, 0.2))
    assert line.conclusion("new") == "no difference shown (0 to 0.200)"
