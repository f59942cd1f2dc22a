"""The Helm chart, rendered with values, and how its objects are compared with kustomize's."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.manifests.rendering import K8S, ROOT, Documents, workloads
from tools.chart import SHORT_LIVED

ONE_POOL = K8S / "chart" / "ci" / "one-pool-values.yaml"
"""What kustomize has by default, and the chart asks for."""


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", ROOT / "tools" / "helm", *words]
    return subprocess.run(command, env=os.environ | SHORT_LIVED, capture_output=True, text=True, timeout=110)


def rendered(
    chart: Path, values: dict[str, Any], namespace: str = "slipstream", *more: str | Path
) -> subprocess.CompletedProcess[str]:
    """With nothing given but these values, and what words of the command line add."""
    return _rendered(chart, yaml.safe_dump(values), namespace, *more)


@cache
def _rendered(chart: Path, values: str, namespace: str, *more: str | Path) -> subprocess.CompletedProcess[str]:
    given = chart.parent / "values.yaml"
    given.write_text(values)
    options = ["--namespace", namespace, "--kube-version", "1.32.0", "--values", given, *more]
    return helm("template", "slipstream", chart, *options)


def template(chart: Path, values: dict[str, Any], namespace: str = "slipstream") -> Documents:
    """With the settings of one pool, where others are not given."""
    settings = yaml.safe_load(ONE_POOL.read_text())["settings"] | values.get("settings", {})
    done = rendered(chart, {**values, "settings": settings}, namespace)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def comparable(documents: Documents) -> dict[tuple[str, str], Any]:
    """By kind and name, without the namespace's own object and the hashes in names."""
    text = re.sub(r"\b(models|model-cache)-[0-9a-z]{10}\b", r"\1", json.dumps(documents))
    found = {(each["kind"], each["metadata"]["name"]): each for each in json.loads(text) if each["kind"] != "Namespace"}
    assert len(found) == sum(each["kind"] != "Namespace" for each in documents)
    return found


def unordered(documents: Documents) -> dict[tuple[str, str], Any]:
    """`comparable`, where the order of a container's environment and of a pod's lists by name does not count."""
    for workload in workloads(documents):
        workload.spec.get("volumes", []).sort(key=lambda each: str(each["name"]))
        workload.spec.get("tolerations", []).sort(key=lambda each: str(each["key"]))
        for container in workload.containers:
            container.get("env", []).sort(key=lambda each: str(each["name"]))
            container.get("volumeMounts", []).sort(key=lambda each: str(each["name"]))
    return comparable(documents)
