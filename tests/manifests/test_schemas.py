"""All that is rendered is what its API says: no field unknown, none missing, of every version that is served."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate
import pytest

from tests.manifests.rendering import COMPONENTS, K8S, NEEDS, OVERLAYS, ROOT, Document, compose, find, render, tool

VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the first with all that is used here, the latest that is bundled."""
PACKAGES = {"keda.sh": "keda", "cert-manager.io": "cert-manager", "monitoring.coreos.com": "prometheus-operator"}
GROUPS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "rolloutStrategy": {
            "additionalProperties": False,
            "required": ["type"],
            "properties": {
                "type": {"const": "RollingUpdate"},
                "rollingUpdateConfiguration": {
                    "additionalProperties": False,
                    "properties": {"maxUnavailable": {}, "maxSurge": {}, "partition": {"type": "integer"}},
                },
            },
        },
        "leaderWorkerTemplate": {
            "additionalProperties": False,
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
"""The part of leaderworkerset.x-k8s.io/v1's schema that is used here; no package of npm has it."""
MUTANTS: list[tuple[tuple[str, str], Callable[[Document], Any]]] = [
    (("ScaledObject", "gateway"), lambda d: d["spec"].update(maxReplicas=3)),
    (("ScaledObject", "gateway"), lambda d: d["spec"].pop("scaleTargetRef")),
    (("ScaledObject", "gateway"), lambda d: d["spec"]["triggers"][0]["metadata"].update(threshold=5)),
    (("Certificate", "gateway"), lambda d: d["spec"].update(dnsName="gateway.slipstream")),
    (("Certificate", "gateway"), lambda d: d["spec"]["usages"].append("anything")),
    (("Issuer", "authority"), lambda d: d["spec"]["ca"].pop("secretName")),
    (("PodMonitor", "slipstream"), lambda d: d["spec"]["podMetricsEndpoints"][0].update(intervall="10s")),
    (("PrometheusRule", "slipstream"), lambda d: d["spec"]["groups"][0]["rules"][0].update(expression="1")),
]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Of all overlays, and of the components that are in none; each document once."""
    folders = [render(K8S / overlay) for overlay in OVERLAYS]
    used = "".join((K8S / overlay / "kustomization.yaml").read_text() for overlay in OVERLAYS)
    others = [name for name in COMPONENTS if f"components/{name}\n" not in used]
    folders += [compose(tmp_path_factory.mktemp(name), [*NEEDS.get(name, []), name]) for name in others]
    distinct = {json.dumps(document, sort_keys=True): document for documents in folders for document in documents}
    return list(distinct.values())


def group(document: Document) -> str:
    return str(document["apiVersion"]).rpartition("/")[0]


def is_custom(document: Document) -> bool:
    return "." in group(document) and not group(document).endswith("k8s.io")


def check_group(document: Document) -> None:
    """Raises ValidationError of either library for a LeaderWorkerSet that is none."""
    jsonschema.validate(document["spec"], GROUPS)
    pods = document["spec"]["leaderWorkerTemplate"]
    for template in (pods["leaderTemplate"], pods["workerTemplate"]):
        labels = template["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": template}
        made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pods"}, "spec": spec}
        kubernetes_validate.validate(made, VERSIONS[0], strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_of_kubernetes_is_valid(everything: list[Document], version: str) -> None:
    groups = [document for document in everything if document["kind"] == "LeaderWorkerSet"]
    assert groups
    for document in groups:
        check_group(document)
    checked = [document for document in everything if not is_custom(document) and document not in groups]
    if version == VERSIONS[0]:  # image volumes came later
        checked = [document for document in checked if "pullPolicy" not in json.dumps(document)]
    assert len(checked) > 50
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda d: d["spec"]["template"]["spec"].update(terminationGracePeriod=5),
        lambda d: d["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["grpc"].pop("port"),
        lambda d: d["spec"]["template"]["spec"]["containers"][0]["ports"][0].update(containerPort="50071"),
        lambda d: d["spec"].pop("selector"),
    ],
)
def test_an_invalid_resource_is_refused(mutate: Callable[[Document], Any]) -> None:
    document = find(render(K8S / "base"), "Deployment", "verifier")
    mutate(document)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda d: d["spec"].update(replica=2),
        lambda d: d["spec"]["leaderWorkerTemplate"].update(restartPolicy="RecreateGroup"),
        lambda d: d["spec"]["leaderWorkerTemplate"].pop("workerTemplate"),
        lambda d: d["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"].update(terminationGracePeriod=5),
    ],
)
def test_an_invalid_leader_worker_set_is_refused(everything: list[Document], mutate: Callable[[Document], Any]) -> None:
    found, *_ = (document for document in everything if document["kind"] == "LeaderWorkerSet")
    changed = copy.deepcopy(found)
    mutate(changed)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError, KeyError)):
        check_group(changed)


def refused(resources: Iterable[Document]) -> set[int]:
    """The numbers of the custom resources that are not of their type."""
    tool("npm")
    lines = [
        f'export const r{number}: import("@kubernetes-models/{PACKAGES[group(each)]}/{each["apiVersion"]}")'
        f".I{each['kind']} = {json.dumps(each)};"
        for number, each in enumerate(resources)
    ]
    command = ["sh", ROOT / "tools" / "crds"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=110)
    found = {int(number) - 1 for number in re.findall(r"\.ts\((\d+),\d+\): error", done.stdout)}
    assert bool(found) is (done.returncode != 0), done.stdout + done.stderr
    return found


def test_every_custom_resource_is_of_its_type_and_what_is_not_is_refused(everything: list[Document]) -> None:
    custom = [document for document in everything if is_custom(document)]
    assert {each["kind"] for each in custom} == {which[0] for which, _ in MUTANTS}
    mutants = []
    for which, mutate in MUTANTS:
        mutants.append(find(render(K8S / "overlays/production"), *which))
        mutate(mutants[-1])
    assert refused([*custom, *mutants]) == set(range(len(custom), len(custom) + len(mutants)))
