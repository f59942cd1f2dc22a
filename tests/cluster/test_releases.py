"""The chart in two namespaces of one cluster: neither release owns what the other one needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.manifests.charts import ONE_POOL
from tools.chart import write

NAMESPACES = ("one", "two")


@pytest.fixture(scope="module")
def charted(kubernetes: Cluster) -> Iterator[tuple[Cluster, Path]]:
    chart = kubernetes.folder / "chart" / "slipstream"
    write(chart)
    for name in NAMESPACES:
        kubernetes.namespace(name, runs=False)
    yield kubernetes, chart
    for name in NAMESPACES:
        kubernetes.away(name)


def test_two_releases_are_installed_and_removed_by_themselves(charted: tuple[Cluster, Path]) -> None:
    kubernetes, chart = charted
    for name in NAMESPACES:
        words = ("install", "slipstream", chart, "-n", name, "--values", ONE_POOL)
        assert "STATUS: deployed" in kubernetes.run("sh", "tools/helm", *words)
    assert _classes(kubernetes) == _own(*NAMESPACES)
    for name in NAMESPACES:
        deployed = kubernetes.objects(name, "deployments")
        classes = {each["spec"]["template"]["spec"].get("priorityClassName") for each in deployed.values()}
        assert classes - {None} == _own(name)
    kubernetes.run("sh", "tools/helm", "uninstall", "slipstream", "-n", NAMESPACES[0])
    assert _classes(kubernetes) == _own(NAMESPACES[1])
    assert kubernetes.objects(NAMESPACES[1], "deployments")


def _own(*namespaces: str) -> set[str]:
    return {f"slipstream-{what}.{name}" for what in ("serving", "drafting") for name in namespaces}


def _classes(kubernetes: Cluster) -> set[str]:
    """Of those namespaces."""
    found = {each["metadata"]["name"] for each in kubernetes.api.items("/apis/scheduling.k8s.io/v1/priorityclasses")}
    return {name for name in found if name.partition(".")[2] in NAMESPACES}
