"""Calibration: what drafters claim against what is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.speculation.selection import ROOT, Selection
from verifier_svc.estimators import calibration as calibration_module
from verifier_svc.estimators.calibration import HALF_LIFE_S, MOST_TABLES, Calibration

LEVELS = [0.0, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 1.0]


@dataclass
class FakeClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def fresh() -> tuple[Calibration, FakeClock]:
    clock = FakeClock()
    return Calibration(clock), clock


def teach(calibration: Calibration, truth: Callable[[float], float], count: int = 6000, depth: int = 1) -> None:
    random = np.random.default_rng(3)
    for confidence in random.uniform(0.0, 1.0, count).tolist():
        calibration.observe("draft", "code", depth, confidence, random.random() < truth(confidence))


def corrected(calibration: Calibration, drafter: str, label: str, depth: int, confidence: float) -> float:
    """Of one node whose ancestors are accepted."""
    log_prob = math.log(confidence) if confidence else -math.inf
    node = Selection((7,), (ROOT,), (depth,), (log_prob,), (log_prob,), (None,))
    return calibration.path_probabilities([drafter], label, node)[0]


def chain(*confidences: float) -> Selection:
    size = len(confidences)
    logs = tuple(map(math.log, confidences))
    sums = tuple(sum(logs[: index + 1]) for index in range(size))
    return Selection((7,) * size, tuple(range(-1, size - 1)), tuple(range(1, size + 1)), logs, sums, (None,) * size)


def test_before_any_evidence_the_claimed_confidence_is_used() -> None:
    calibration, _ = fresh()
    for confidence in LEVELS:
        assert corrected(calibration, "draft", "", 1, confidence) == pytest.approx(confidence, abs=0.0101)


@pytest.mark.parametrize(
    "truth",
    [lambda c: c, lambda c: c**3, lambda c: c**0.3, lambda c: 0.4 * c, lambda c: 0.5 + 0.5 * c],
    ids=["honest", "over-confident", "under-confident", "never sure", "never unsure"],
)
def test_it_converges_to_the_measured_acceptance(truth: Callable[[float], float]) -> None:
    calibration, _ = fresh()
    teach(calibration, truth)
    errors = [abs(corrected(calibration, "draft", "code", 1, level) - truth(level)) for level in LEVELS if level >= 0.1]
    # A bin remembers some 256 observations: three standard deviations of a share of those are 0.09.
    assert max(errors) < 0.11
    assert sum(errors) / len(errors) < 0.045


def test_confidences_near_one_are_calibrated_accurately() -> None:
    calibration, _ = fresh()
    random = np.random.default_rng(4)
    for _ in range(1500):
        calibration.observe("draft", "", 1, 0.999, bool(random.random() < 0.998))
    assert corrected(calibration, "draft", "", 1, 0.999) > 0.985
    for _ in range(1500):
        calibration.observe("draft", "", 1, 0.999, bool(random.random() < 0.6))
    assert corrected(calibration, "draft", "", 1, 0.999) == pytest.approx(0.6, abs=0.1)


evidence = st.tuples(st.integers(1, 20), st.floats(0.0, 1.0), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(evidence, max_size=150), st.floats(0.0, 500.0))
def test_calibrated_probabilities_are_valid_and_never_fall_with_more_confidence(
    observed: list[tuple[int, float, bool]], later_s: float
) -> None:
    calibration, clock = fresh()
    for depth, confidence, accepted in observed:
        calibration.observe("draft", "code", depth, confidence, accepted)
    clock.now += later_s
    grid = [step / 200 for step in range(201)]
    for depth in (1, 3, 30):
        for label in ("code", "prose"):
            shares = [corrected(calibration, "draft", label, depth, confidence) for confidence in grid]
            assert shares == sorted(shares)
            assert shares[0] >= 0.0 and shares[-1] <= 1.0


@pytest.mark.parametrize("odd", [-1.0, 2.0, math.inf, -math.inf, math.nan])
def test_a_claim_that_is_no_probability_still_gives_one(odd: float) -> None:
    calibration, _ = fresh()
    calibration.observe("draft", "", 1, odd, True)
    assert 0.0 <= corrected(calibration, "draft", "", 1, 0.5) <= 1.0


def test_a_new_label_starts_from_its_drafter_and_learns_its_own() -> None:
    calibration, _ = fresh()
    teach(calibration, lambda c: 0.5 * c)
    assert corrected(calibration, "draft", "new", 1, 0.8) == pytest.approx(0.4, abs=0.08)
    assert corrected(calibration, "other", "code", 1, 0.8) == pytest.approx(0.8)
    for _ in range(300):
        calibration.observe("draft", "new", 1, 0.8, True)
    assert corrected(calibration, "draft", "new", 1, 0.8) > 0.9
    assert corrected(calibration, "draft", "code", 1, 0.8) == pytest.approx(0.4, abs=0.1)


def test_an_unseen_depth_starts_from_the_seen_ones() -> None:
    calibration, _ = fresh()
    teach(calibration, lambda c: 0.5 * c)
    assert corrected(calibration, "draft", "code", 12, 0.8) == pytest.approx(0.4, abs=0.08)


def test_depths_are_calibrated_separately() -> None:
    calibration, _ = fresh()
    for _ in range(300):
        calibration.observe("draft", "code", 1, 0.7, True)
        calibration.observe("draft", "code", 6, 0.7, False)
    assert corrected(calibration, "draft", "code", 1, 0.7) > 0.9
    assert corrected(calibration, "draft", "code", 5, 0.7) < 0.1


def test_a_drafter_that_was_cut_off_gets_another_chance() -> None:
    """Without candidates verified there is no evidence; time alone must bring the claim back."""
    calibration, clock = fresh()
    for _ in range(1000):
        calibration.observe("draft", "code", 1, 0.9, False)
    assert corrected(calibration, "draft", "code", 1, 0.9) < 0.05
    clock.now += 8 * HALF_LIFE_S
    assert corrected(calibration, "draft", "code", 1, 0.9) > 0.6


@pytest.mark.skipif(calibration_module.__file__.endswith(".so"), reason="a compiled class has no subclasses")
def test_only_nodes_under_accepted_parents_give_evidence() -> None:
    """root -> 0 -> 1 -> 2 and a sibling 3 of node 1; the path ends at node 0."""
    seen: list[tuple[int, float, bool]] = []

    class Recorder(Calibration):
        def observe(self, drafter: str, label: str, depth: int, confidence: float, accepted: bool) -> None:
            seen.append((depth, round(confidence, 6), accepted))

    logs = tuple(map(math.log, (0.9, 0.8, 0.7, 0.1)))
    chosen = Selection((1, 2, 3, 4), (ROOT, 0, 1, 0), (1, 2, 3, 2), logs, (0.0,) * 4, (None,) * 4)
    Recorder(lambda: 0.0).learn(["draft"] * len(chosen), "", chosen, (0,))
    assert seen == [(1, 0.9, True), (2, 0.8, False), (2, 0.1, False)]


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_learning_from_chains_is_not_biased_by_where_they_break(acceptance: float) -> None:
    """Counting the nodes behind a rejection as rejected too would halve the estimate at depth 3 and more."""
    calibration, _ = fresh()
    random, selection = np.random.default_rng(5), chain(*[0.6] * 4)
    for _ in range(4000):
        accepted = 0
        while accepted < 4 and random.random() < acceptance:
            accepted += 1
        calibration.learn(["draft"] * len(selection), "", selection, range(accepted))
    for depth in (1, 2, 3):
        assert corrected(calibration, "draft", "", depth, 0.6) == pytest.approx(acceptance, abs=0.12)
    paths = calibration.path_probabilities(["draft"] * len(selection), "", selection)
    assert paths == pytest.approx([acceptance**depth for depth in (1, 2, 3, 4)], abs=0.15)


def test_path_probabilities_are_products_along_the_tree() -> None:
    calibration, _ = fresh()
    logs = tuple(map(math.log, (0.9, 0.5, 0.8, 0.25)))
    chosen = Selection((1, 2, 3, 4), (ROOT, 0, 1, 0), (1, 2, 3, 2), logs, (0.0,) * 4, (None,) * 4)
    assert calibration.path_probabilities(["draft"] * len(chosen), "", chosen) == pytest.approx(
        [0.9, 0.45, 0.36, 0.225]
    )
    assert calibration.path_probabilities([], "", Selection()) == []


def test_labels_that_clients_invent_do_not_fill_the_memory() -> None:
    calibration, _ = fresh()
    for number in range(3 * MOST_TABLES):
        calibration.observe("draft", f"label {number}", 1, 0.9, False)
        corrected(calibration, "draft", f"unseen {number}", 1, 0.9)
    assert len(calibration) == MOST_TABLES
    assert corrected(calibration, "draft", "whatever", 1, 0.9) < 0.3, "the drafter itself is not forgotten"
