"""From overlay to overlay and from model to model: a real API server takes each step over what is there, and nothing is
left that the next step may not change. Pods do not run: that they do is shown of `local` and `standalone`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.definitions import define
from tests.cluster.images import ROOT

NAMESPACE = "slipstream"
WAY = ("local", "gpu", "standalone", "production", "standalone", "gpu", "local")
ANOTHER_MODEL = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: slipstream
resources: [{up}/overlays/production]
configMapGenerator:
  - {{name: models, behavior: merge, literals: [target={model}]}}
transformers: [{up}/settings]
"""


@pytest.fixture(scope="module")
def empty(kubernetes: Cluster) -> Iterator[Cluster]:
    """With what the operators of `production` define, without their schemas."""
    define(kubernetes)
    kubernetes.namespace(NAMESPACE, runs=False)
    yield kubernetes
    kubernetes.away(NAMESPACE)


@pytest.mark.slow
def test_each_overlay_is_taken_over_the_one_before_and_changes_nothing_again(empty: Cluster) -> None:
    for overlay in WAY:
        folder = f"k8s/overlays/{overlay}"
        said = empty.kubectl("apply", "--server-side", "-k", folder)
        assert "Warning" not in said and "conflict" not in said, (overlay, said)
        empty.kubectl("diff", "--server-side", "-k", folder)


@pytest.mark.slow
def test_another_model_is_taken_over_the_one_before(empty: Cluster) -> None:
    """The job that fetches it cannot be changed, so it is another one."""
    jobs = list[set[str]]()
    for model in ("org/one", "org/two", "org/one"):
        folder = _overlay(empty.folder / model.replace("/", "-"), model)
        empty.kubectl("apply", "--server-side", "-k", folder)
        empty.kubectl("diff", "--server-side", "-k", folder)
        assert _models(empty) == {model}
        jobs.append(set(empty.objects(NAMESPACE, "jobs", "batch/v1")))
    assert jobs[0] < jobs[1] == jobs[2]


def _overlay(folder: Path, model: str) -> Path:
    folder.mkdir(exist_ok=True)
    up = os.path.relpath(ROOT / "k8s", folder)
    (folder / "kustomization.yaml").write_text(ANOTHER_MODEL.format(up=up, model=model))
    return folder


def _models(cluster: Cluster) -> set[str]:
    """What the verifier is to load."""
    [container] = cluster.objects(NAMESPACE, "deployments")["verifier"]["spec"]["template"]["spec"]["containers"]
    [named] = [each["valueFrom"]["configMapKeyRef"] for each in container["env"] if each["name"] == "MODEL"]
    return {cluster.objects(NAMESPACE, "configmaps", "v1")[named["name"]]["data"][named["key"]]}
