"""More work than there are pods for: sessions are bounded, and scaling begins before the objectives are missed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from capacity.manifests import Bounds, Scaling, component, values
from capacity.scenario import read
from gateway.config import GatewayConfig
from tests.manifests.charts import template
from tests.manifests.policies import settings
from tests.manifests.rendering import K8S, ROOT, Document, find, render, roles

PLANNED = {"gateway": 256, "verifier": 32, "drafter-model": 64}
"""Sessions that one pod is to bear: a verifier's by `slipstream plan examples/plan/h100-l4.toml`."""


def triggers(name: str) -> dict[str, Document]:
    scaled = find(render(K8S / "overlays/production"), "ScaledObject", name)["spec"]["triggers"]
    return {each["name"]: each["metadata"] for each in scaled}


def test_each_pod_takes_at_most_twice_what_it_is_to_bear() -> None:
    documents = render(K8S / "overlays/production")
    bounds = {each.name: settings(each, documents).max_sessions for each in roles(documents) if each.name in PLANNED}
    assert bounds == {name: 2 * planned for name, planned in PLANNED.items()}


def test_pods_are_added_at_seven_tenths_of_what_they_are_to_bear() -> None:
    for name in ("gateway", "verifier"):
        threshold = int(triggers(name)["sessions"]["threshold"])
        assert 0.65 * PLANNED[name] <= threshold <= 0.71 * PLANNED[name]


def test_sessions_that_wait_for_a_verifier_count_as_sessions() -> None:
    found = triggers("verifier")
    assert set(found) == {"sessions", "kv"}
    asked = re.findall(r"slipstream_\w+", found["sessions"]["query"])
    assert asked == ["slipstream_verifier_sessions", "slipstream_gateway_waiting_sessions"]


def test_drafters_may_go_to_zero_and_any_session_brings_one_back() -> None:
    found = triggers("drafter-model")
    for name in ("needed", "sessions"):  # nobody measures drafters that are not there
        parts = re.findall(
            r"\(sum\(slipstream_drafter_\w+\{[^}]*\}\) or vector\(0\)\)|\) or vector\(0\)$", found[name]["query"]
        )
        assert parts, found[name]["query"]
    assert found["any"]["query"].startswith("sum(slipstream_gateway_sessions{")
    assert int(found["any"]["threshold"]) >= 1_000_000


SCALING = Scaling(Bounds(6, 22, 64), Bounds(5, 27, 90), speculates=True)


def test_a_plan_writes_a_component_and_values_of_the_chart(chart: Path, tmp_path: Path) -> None:
    given = read(ROOT / "examples/plan/h100-l4.toml")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "kustomization.yaml").write_text(json.dumps(component(given, SCALING)))
    lines = [f"resources: [{os.path.relpath(K8S, tmp_path)}/overlays/production]", "components: [plan]"]
    (tmp_path / "kustomization.yaml").write_text("\n".join(lines))
    ways = {
        "kustomize": render(tmp_path),
        "helm": template(chart, {"overlay": "production", **values(given, SCALING)}),
    }
    for way, documents in ways.items():
        for name, bounds, trigger in (
            ("verifier", SCALING.verifier, "sessions"),
            ("drafter-model", SCALING.drafter, "needed"),
        ):
            assert bounds is not None
            scaled = find(documents, "ScaledObject", name)["spec"]
            thresholds = {each["name"]: each["metadata"]["threshold"] for each in scaled["triggers"]}
            assert (scaled["maxReplicaCount"], thresholds[trigger]) == (bounds.most_pods, str(bounds.threshold)), way
            (workload,) = (each for each in roles(documents) if each.name == name)
            assert settings(workload, documents).max_sessions == bounds.most_sessions, way
        (gateway,) = (each for each in roles(documents) if each.role == "gateway")
        config = settings(gateway, documents)
        assert isinstance(config, GatewayConfig)
        assert (config.slo_ttft_s, config.slo_tpot_s, config.verifier_price) == (2.0, 0.04, 6.0), way
