"""What the autoscaler is told is what a fleet needs: the manifests' own thresholds, on simulated workers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.scaling import crowd
from capacity.cell import Outcome
from capacity.scenario import read
from drafter_svc.metrics_source import DraftStepStats
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.proposers.drafting.step import DraftRequest
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.telemetry import metrics

ROOT = Path(__file__).resolve().parents[3]
SCENARIO = read(ROOT / "examples/plan/h100-l4.toml")
MOST, TOLERANCE, ROUNDS = 32, 0.1, 12
"""`maxReplicaCount`; what the autoscaler lets pass; how often it looks."""
RATES: dict[str, Callable[[Outcome], float]] = {
    metrics.DRAFTER_BUSY.name: lambda seen: seen.drafters_busy,
    metrics.DRAFTER_NEEDED.name: lambda seen: seen.drafters_needed,
}


def triggers(role: str) -> dict[str, tuple[str, float]]:
    """(first metric, threshold) by name."""
    scaled: dict[str, Any] = yaml.safe_load((ROOT / f"k8s/components/autoscaling/{role}.yaml").read_text("utf-8"))
    asked = [(each["name"], each["metadata"]) for each in scaled["spec"]["triggers"]]
    found = [(name, re.findall(r"slipstream_\w+", data["query"]), data["threshold"]) for name, data in asked]
    return {name: (of[0], float(threshold)) for name, of, threshold in found}


@cache
def seen(sessions: int, drafters: int, verifiers: int, seconds: float = 0.25) -> Outcome:
    return crowd(SCENARIO, sessions, drafters, verifiers, seconds)


def drafters(sessions: int, present: int) -> int:
    """Where the autoscaler ends that begins with so many, by what drafters tell of their passes. It adds as many as are
    missing, and takes away one at a time; verifiers are there for all."""
    ((metric, threshold),) = (each for each in triggers("drafter").values() if each[0] in RATES)
    for _ in range(ROUNDS):
        ratio = RATES[metric](seen(sessions, present, math.ceil(sessions / 32))) / threshold
        if abs(ratio - 1.0) > TOLERANCE:
            present = min(MOST, max(1, present - 1, math.ceil(ratio * present)))
    return present


@pytest.mark.parametrize("before", [1, 4])
def test_one_session_needs_one_drafter_however_many_there_are(before: int) -> None:
    assert drafters(1, before) == 1


@pytest.mark.parametrize(
    ("sessions", "least", "most"), [(16, 1, 1), pytest.param(64, 2, 2, marks=pytest.mark.slow), (96, 3, 4)]
)
def test_more_sessions_need_more_drafters_whatever_there_was_before(sessions: int, least: int, most: int) -> None:
    ends = {drafters(sessions, before) for before in (1, 5)}
    assert least <= min(ends) <= max(ends) <= most


def test_a_prompt_needs_its_passes_and_a_guess_those_that_its_path_is_likely_to_need() -> None:
    session = DraftSession(1, SamplingParams(), DraftPolicy(100, 0.0), [5, 6, 7], 3, 1000)
    sure = session.tree.add(session.tree.root, 8, math.log(0.5))
    assert sure is not None
    ahead = session.tree.add(sure, 9, math.log(0.25))
    assert ahead is not None

    def needed(*starts: DraftNode) -> float:
        stats = DraftStepStats()
        nodes = [node for node in starts if node is not session.tree.root]
        request = DraftRequest(session, session.context(nodes, starts, 1), [session.tree.root, *nodes])
        stats.step_began([request] * 3)
        stats.step_ended(2.0)
        return stats.needed_s

    assert [needed(), needed(session.tree.root, sure)] == [6.0, 6.0]
    assert [needed(sure, ahead), needed(ahead)] == pytest.approx([3.0, 0.75])
    session.tree.commit([8])
    assert needed(ahead) == pytest.approx(1.5)


def test_need_rises_before_rounds_are_late_and_never_beyond_the_sessions() -> None:
    """Where drafters run far ahead what they guess on is unlikely, where they are behind it is certain. With still more
    sessions the verifier has fewer of them drafted for, and the need of each stays."""
    windows_s = {1: 1.0, 8: 1.0, 32: 0.4, 96: 0.4}
    needed = [seen(sessions, 1, 1, window).drafters_needed / sessions for sessions, window in windows_s.items()]
    assert needed[1] == pytest.approx(needed[0], rel=0.15)
    assert 0.0 < 1.15 * needed[1] < needed[2] <= 1.0
    assert needed[3] == pytest.approx(needed[2], rel=0.15)


def test_verifiers_are_added_where_tokens_come_late_and_kv_is_half_empty() -> None:
    crowded, asked = seen(192, 1, 1, 0.6), triggers("verifier")
    assert crowded.inside / crowded.tokens_per_s > SCENARIO.slo.tpot_p95_s
    lengths = SCENARIO.traffic.prompt.average + SCENARIO.traffic.output.average
    assert crowded.inside * lengths < 0.5 * SCENARIO.verifying.kv_tokens
    (most,) = (most for metric, most in asked.values() if metric == metrics.VERIFIER_SESSIONS.name)
    assert crowded.inside > most
