"""The ScaledObjects of `autoscaling` with bounds as `slipstream plan` writes them: drafters and verifiers come with
sessions and go after them, apart from each other, and no request notices."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.api import wait
from tests.cluster.autoscaler import autoscaling
from tests.cluster.cluster import PATIENCE, Cluster
from tests.cluster.definitions import define
from tests.cluster.images import ROOT

NAMESPACE = "slipstream"
READY_S, SCALED_S = 60.0, 120.0
OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: slipstream
resources: [{up}/overlays/local]
components: [{up}/components/autoscaling]
transformers: [{up}/settings]
patches:
  - target: {{kind: ScaledObject, name: gateway}}
    patch: |
      - {{op: replace, path: /spec/minReplicaCount, value: 1}}
      - {{op: replace, path: /spec/maxReplicaCount, value: 1}}
  - target: {{kind: ScaledObject, name: verifier}}
    patch: |
      - {{op: replace, path: /spec/minReplicaCount, value: 1}}
      - {{op: replace, path: /spec/maxReplicaCount, value: 2}}
      - {{op: replace, path: /spec/triggers/0/metadata/threshold, value: "2"}}
      - {{op: replace, path: /spec/advanced/horizontalPodAutoscalerConfig/behavior/scaleDown, value: {down}}}
  - target: {{kind: ScaledObject, name: drafter-model}}
    patch: |
      - {{op: replace, path: /spec/maxReplicaCount, value: 3}}
      - {{op: replace, path: /spec/triggers/1/metadata/threshold, value: "1"}}
      - {{op: replace, path: /spec/advanced/horizontalPodAutoscalerConfig/behavior/scaleDown, value: {down}}}
"""
SOON = "{stabilizationWindowSeconds: 5, policies: [{type: Pods, value: 1, periodSeconds: 5}]}"
"""Instead of minutes, which are for loads that come and go."""


@pytest.fixture(scope="module")
def scaled(kubernetes: Cluster) -> Iterator[Cluster]:
    define(kubernetes)
    kubernetes.namespace(NAMESPACE)
    folder = kubernetes.folder / "scaled"
    folder.mkdir()
    up = os.path.relpath(ROOT / "k8s", folder)
    (folder / "kustomization.yaml").write_text(OVERLAY.format(up=up, down=SOON))
    kubernetes.kubectl("apply", "--server-side", "-k", folder)
    kubernetes.wait_available(NAMESPACE, READY_S)
    with autoscaling(kubernetes):
        yield kubernetes
    kubernetes.away(NAMESPACE)


@pytest.mark.slow
def test_drafters_and_verifiers_come_with_sessions_and_go_after_them(scaled: Cluster) -> None:
    wait(lambda: _replicas(scaled) == (1, 1), "one of each without load", SCALED_S * PATIENCE)
    with scaled.load(NAMESPACE) as seen:
        most = [0, 0]

        def both_grew() -> bool:
            for place, count in enumerate(_replicas(scaled)):
                most[place] = max(most[place], count)
            return most[0] >= 2 and most[1] == 2

        wait(both_grew, f"drafters and verifiers come: {most}", SCALED_S * PATIENCE)
        scaled.wait_available(NAMESPACE, READY_S)
        seen_by_then = len(scaled.names(NAMESPACE, "drafter-model"))
    assert seen_by_then >= 2
    wait(lambda: _replicas(scaled) == (1, 1), "they go", SCALED_S * PATIENCE)
    with scaled.load(NAMESPACE) as after:
        pass
    for each in (seen, after):
        assert each["done"] and (each["errors"], each["changed"]) == ({}, [])


def _replicas(cluster: Cluster) -> tuple[int, int]:
    """Of the drafter with a model and of the verifier, as they are to be."""
    found = cluster.objects(NAMESPACE, "deployments")
    return found["drafter-model"]["spec"]["replicas"], found["verifier"]["spec"]["replicas"]
