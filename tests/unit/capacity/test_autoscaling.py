"""Rising traffic while verifiers start, with the manifests' own threshold and bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.autoscaling import OBJECTIVE_S, SETTINGS, TRAFFIC, simulated

ROOT = Path(__file__).resolve().parents[3]
BEFORE, NOW = SETTINGS.values()
COLD_STARTS_S = (180, 600, 900)


def test_the_simulated_settings_are_those_of_the_manifests() -> None:
    scaled = yaml.safe_load((ROOT / "k8s/components/autoscaling/verifier.yaml").read_text("utf-8"))["spec"]
    (sessions,) = (each["metadata"]["threshold"] for each in scaled["triggers"] if each["name"] == "sessions")
    pod = yaml.safe_load((ROOT / "k8s/components/gpu-verifier/verifier.yaml").read_text("utf-8"))["spec"]["template"]
    env = {each["name"]: each["value"] for each in pod["spec"]["containers"][0]["env"]}
    assert (int(sessions), int(env["VERIFIER_MAX_SESSIONS"])) == NOW


@pytest.mark.parametrize("cold_start_s", COLD_STARTS_S)
@pytest.mark.parametrize("name", TRAFFIC)
def test_fewer_requests_are_slow_and_none_by_much(name: str, cold_start_s: int) -> None:
    """A bound of twice what a verifier is to bear bounds the time of a token, too; without one it grew twentyfold."""
    traffic, seconds = TRAFFIC[name]
    before, now = (simulated(traffic, seconds, cold_start_s, *setting) for setting in (BEFORE, NOW))
    assert now.beyond < 0.75 * before.beyond
    assert now.slowest_s < 1.6 * OBJECTIVE_S < before.slowest_s
    assert now.beyond + now.refused < 1.4 * (before.beyond + before.refused)
    assert now.pod_hours < 1.15 * before.pod_hours


def test_a_slow_rise_of_traffic_refuses_under_2_percent_of_requests() -> None:
    traffic, seconds = TRAFFIC["8 to 24 requests/s over 30 minutes"]
    assert [simulated(traffic, seconds, cold, *NOW).refused < 0.02 for cold in COLD_STARTS_S] == [True] * 3


def test_steady_traffic_within_the_plan_is_never_slow() -> None:
    seen = simulated(lambda _: 8.0, 3600, 600, *NOW)
    assert (seen.beyond, seen.refused) == (0.0, 0.0)
