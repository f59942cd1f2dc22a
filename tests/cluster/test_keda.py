"""The project's ScaledObjects under KEDA's own operator: it makes the HPAs that the other tests scale by, and from zero
a session brings the first drafter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.api import wait
from tests.cluster.autoscaler import PROMETHEUS, hpa_of
from tests.cluster.cluster import PATIENCE, Cluster
from tests.cluster.definitions import define
from tests.cluster.images import ROOT
from tests.cluster.keda import absent, keda
from tests.cluster.programs import ASSETS
from tests.cluster.test_scaling import NAMESPACE, OVERLAY, READY_S, SCALED_S, SOON

FROM_ZERO = """
  - target: {kind: ScaledObject, name: drafter-model}
    patch: |
      - {op: replace, path: /spec/minReplicaCount, value: 0}
      - {op: add, path: /spec/cooldownPeriod, value: 5}
"""
IN_THE_CLUSTER = "http://prometheus-operated.monitoring:9090"


@pytest.fixture(scope="module")
def scaled(kubernetes: Cluster) -> Iterator[Cluster]:
    if missing := absent():
        pytest.fail(f"{', '.join(missing)} is not in {os.environ.get(ASSETS)} ({ASSETS}); `make keda` builds it.")
    define(kubernetes)
    kubernetes.namespace(NAMESPACE)
    folder = kubernetes.folder / "keda"
    folder.mkdir()
    overlay = OVERLAY.format(up=os.path.relpath(ROOT / "k8s", folder), down=SOON) + FROM_ZERO
    (folder / "kustomization.yaml").write_text(overlay)
    with keda(kubernetes):
        objects = kubernetes.kubectl("kustomize", folder)
        kubernetes.kubectl("apply", "--server-side", "-f", "-", text=objects.replace(IN_THE_CLUSTER, PROMETHEUS))
        kubernetes.wait_available(NAMESPACE, READY_S)
        yield kubernetes
        kubernetes.kubectl("-n", NAMESPACE, "delete", "scaledobjects", "--all")  # while the operator takes them back
    kubernetes.away(NAMESPACE)


@pytest.mark.slow
def test_keda_makes_the_hpas_that_other_tests_scale_by(scaled: Cluster) -> None:
    kind = "autoscaling/v2"
    wanted = {f"keda-hpa-{name}" for name in scaled.objects(NAMESPACE, "scaledobjects", "keda.sh/v1alpha1")}
    wait(lambda: wanted == set(scaled.objects(NAMESPACE, "horizontalpodautoscalers", kind)), "HPAs", READY_S * PATIENCE)
    for name, own in scaled.objects(NAMESPACE, "scaledobjects", "keda.sh/v1alpha1").items():
        theirs = scaled.objects(NAMESPACE, "horizontalpodautoscalers", kind)[f"keda-hpa-{name}"]
        assert _facts(hpa_of(own)) == _facts(theirs)


def _plain(target: dict[str, str]) -> tuple[str, float]:
    """The API server writes 1000000 as 1M."""
    value, units = target["averageValue"], {"m": 1e-3, "k": 1e3, "M": 1e6}
    return target["type"], float(value.rstrip("mkM")) * units.get(value[-1], 1.0)


def _facts(hpa: dict[str, Any]) -> dict[str, Any]:
    spec = hpa["spec"]
    metrics = [
        (
            each["type"],
            each["external"]["metric"]["name"],
            each["external"]["metric"]["selector"]["matchLabels"],
            _plain(each["external"]["target"]),
        )
        for each in spec["metrics"]
    ]
    policies = {
        way: [(each["type"], each["value"], each["periodSeconds"]) for each in rule["policies"]]
        for way, rule in spec["behavior"].items()
    }
    return {
        "of": spec["scaleTargetRef"],
        "replicas": (spec["minReplicas"], spec["maxReplicas"]),
        "metrics": sorted(map(repr, metrics)),
        "policies": policies,
    }


@pytest.mark.slow
def test_the_first_session_brings_drafters_from_zero_and_they_go_after_it(scaled: Cluster) -> None:
    wait(lambda: _drafters(scaled) == 0, "no drafter without a session", SCALED_S * PATIENCE)
    with scaled.load(NAMESPACE) as seen:
        wait(lambda: _drafters(scaled) >= 2, "drafters come", SCALED_S * PATIENCE)
        scaled.wait_available(NAMESPACE, READY_S)
    wait(lambda: _drafters(scaled) == 0, "they go", SCALED_S * PATIENCE)
    assert seen["done"] and (seen["errors"], seen["changed"]) == ({}, [])


def _drafters(cluster: Cluster) -> int:
    return int(cluster.objects(NAMESPACE, "deployments")["drafter-model"]["spec"]["replicas"])
