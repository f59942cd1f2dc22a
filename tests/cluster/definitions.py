"""Kinds of operators that are not here, defined without their schemas."""

from __future__ import annotations

import json

from tests.cluster.api import wait
from tests.cluster.cluster import PATIENCE, Cluster
from tests.manifests.api_server import CUSTOM

DEFINED_S = 30.0


def define(cluster: Cluster) -> None:
    """Returns when the API server knows them."""
    for version, kinds in CUSTOM.items():
        for kind, plural in kinds.items():
            cluster.kubectl("apply", "-f", "-", text=json.dumps(_definition(version, kind, plural)))
    wait(lambda: not _undefined(cluster), "the definitions are served", DEFINED_S * PATIENCE)


def _definition(version: str, kind: str, plural: str) -> dict[str, object]:
    group, _, name = version.partition("/")
    fields = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [{"name": name, "served": True, "storage": True, "schema": fields}],
        },
    }


def _undefined(cluster: Cluster) -> set[str]:
    served = {line.split()[0] for line in cluster.kubectl("api-resources", "--no-headers").splitlines()}
    return {plural for kinds in CUSTOM.values() for plural in kinds.values()} - served
