"""What kustomize makes of k8s/, as data."""

from __future__ import annotations

import json
import os
import re
import shutil
import string
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tools.chart import SHORT_LIVED

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("base", *(f"overlays/{path.name}" for path in sorted((K8S / "overlays").iterdir())))
COMPONENTS = tuple(path.name for path in sorted((K8S / "components").iterdir()) if path.name != "models")
"""For users: `models` is a part of three others."""
NEEDS = {
    "multi-gpu-verifier": ["gpu-verifier"],
    "vllm-drafter": ["gpu-drafter"],
    "public-certificate": ["mtls"],
    "multi-node-verifier": ["gpu-verifier", "multi-gpu-verifier"],
    "multi-node-autoscaling": ["gpu-verifier", "multi-gpu-verifier", "autoscaling", "multi-node-verifier"],
}
"""Components that stand on others."""
ROLES = ("gateway", "verifier", "drafter")
Document = dict[str, Any]
Documents = list[Document]


class Workload(NamedTuple):
    """What runs pods, and the pods."""

    kind: str
    name: str
    labels: dict[str, str]
    spec: Document
    """Of a pod."""
    document: Document

    @property
    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def owner(self) -> tuple[str, str]:
        """Kind and name of what says how many pods there are."""
        return self.kind, str(self.document["metadata"]["name"])

    @property
    def role(self) -> str:
        """One of ROLES, or empty for what is not ours."""
        component = self.labels.get("app.kubernetes.io/component", "")
        return component if component in ROLES else ""

    @property
    def reads_settings_of(self) -> str:
        """The role whose settings it reads; empty for what is not ours."""
        component = self.labels.get("app.kubernetes.io/component", "").removesuffix("-follower")
        return component if component in ROLES else ""

    @property
    def surge(self) -> int:
        """Pods, or groups of them, that a rollout may add."""
        spec = self.document["spec"]
        if self.kind == "LeaderWorkerSet":
            return int(spec["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"])
        return int(spec["strategy"]["rollingUpdate"]["maxSurge"])


def tool(name: str) -> str:
    """Its path. Where it is missing the test is skipped, or fails with MANIFESTS_REQUIRED=1."""
    found = shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("MANIFESTS_REQUIRED") == "1" else pytest.skip)(f"{name} is not on this machine")
    return found


@cache
def _rendered(folder: Path) -> str:
    """As JSON, which is read in a tenth of the time that YAML takes."""
    words = [tool("kubectl"), "kustomize", folder]
    done = subprocess.run(words, env=os.environ | SHORT_LIVED, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[:2000]
    return json.dumps(list(yaml.load_all(done.stdout, yaml.CSafeLoader)))


def render(folder: Path) -> Documents:
    """A copy of one's own."""
    documents: Documents = json.loads(_rendered(folder))
    return documents


def compose(folder: Path, components: Sequence[str]) -> Documents:
    """The base with these components on top, by a kustomization in `folder`."""
    up = os.path.relpath(K8S, folder)
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", "namespace: slipstream"]
    lines += ["resources:", f"  - {up}/base", "components:", *(f"  - {up}/components/{name}" for name in components)]
    (folder / "kustomization.yaml").write_text("\n".join(lines))
    return render(folder)


def workloads(documents: Documents) -> Iterator[Workload]:
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            template = document["spec"]["template"]
            labels = template["metadata"].get("labels", {})
            yield Workload(document["kind"], document["metadata"]["name"], labels, template["spec"], document)
        elif document["kind"] == "LeaderWorkerSet":
            name, group = document["metadata"]["name"], document["spec"]["leaderWorkerTemplate"]
            for pod in ("leader", "worker"):
                template = group[f"{pod}Template"]
                labels = template["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/name": name}
                yield Workload(document["kind"], f"{name} {pod}", labels, template["spec"], document)


def roles(documents: Documents) -> list[Workload]:
    return [workload for workload in workloads(documents) if workload.role]


def containers(documents: Documents) -> Iterator[tuple[Workload, Document]]:
    return ((workload, container) for workload in workloads(documents) for container in workload.containers)


def find(documents: Documents, kind: str, name: str) -> Document:
    """By its name, with the hash that kustomize puts behind it or without."""
    named = re.compile(rf"{re.escape(name)}(-[0-9a-z]{{10}})?")
    (found,) = (d for d in documents if d["kind"] == kind and named.fullmatch(d["metadata"]["name"]))
    return found


def environment(container: Document, documents: Documents) -> dict[str, str]:
    """As the process sees it: values may name variables that stand before them, as `$(NAME)`."""
    values: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom")
        if source is None:
            values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], name[0]), entry["value"])
        elif "fieldRef" in source:
            values[entry["name"]] = source["fieldRef"]["fieldPath"]
        elif "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            values[entry["name"]] = find(documents, "ConfigMap", reference["name"])["data"][reference["key"]]
        else:
            values[entry["name"]] = SECRETS[source["secretKeyRef"]["name"]]
    return values


def amount(quantity: str) -> float:
    """Cores or bytes, as Kubernetes or Redis writes them."""
    units = {"": 1.0, "m": 1e-3, "mb": 2**20, "Mi": 2**20, "Gi": 2**30}
    number = quantity.rstrip(string.ascii_letters)
    return float(number) * units[quantity.removeprefix(number)]


SECRETS = {"gateway-store": "rediss://user:password@redis.example:6379/0", "hub": "token", "redis": "word"}
