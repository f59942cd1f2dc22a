"""What manifests must keep to in how many pods there are, and how many may be away."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slipstream.telemetry.metrics import DECLARED, DEPRECATED
from tests.manifests.rendering import Document, Documents, roles, workloads

LOST_S = 30
"""Seconds after which pods leave a node that does not answer."""
CURRENT = {metric.name for metric in DECLARED}.difference(DEPRECATED)


def only_one_owner_of_replicas(documents: Documents) -> Iterator[str]:
    scaled = {_scaled(d["spec"]["scaleTargetRef"]) for d in documents if d["kind"] == "ScaledObject"}
    known = {workload.owner for workload in workloads(documents)}
    for kind, name in scaled - known:
        yield f"{kind} {name} is scaled and is not there"
    for workload in workloads(documents):
        if workload.owner in scaled and "replicas" in workload.document["spec"]:
            yield f"{workload.name} is scaled, and every apply would set it back to its `replicas`"


def _scaled(target: Document) -> tuple[str, str]:
    """KEDA's defaults are a Deployment's."""
    kind = target.get("kind", "Deployment")
    version = "apps/v1" if kind == "Deployment" else "leaderworkerset.x-k8s.io/v1"
    assert target.get("apiVersion", "apps/v1") == version
    return kind, target["name"]


def scaling_is_by_work_and_slow_to_shrink(documents: Documents) -> Iterator[str]:
    for document in documents:
        if document["kind"] != "ScaledObject":
            continue
        name, spec = document["metadata"]["name"], document["spec"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        slow = down["stabilizationWindowSeconds"] >= 300 and down["policies"] == [
            {"type": "Pods", "value": 1, "periodSeconds": 120}
        ]
        if not slow or (spec["minReplicaCount"] < 1 and not name.startswith("drafter")):
            yield f"{name} shrinks too fast"
        if not spec.get("fallback", {}).get("replicas"):
            yield f"{name} has no size for when nothing is measured"
        for trigger in spec["triggers"]:
            query = trigger["metadata"].get("query", "")
            asked = set(re.findall(r"\bslipstream_\w+", query))
            if trigger["type"] != "prometheus" or not asked or not asked <= CURRENT:
                yield f"{name} is not scaled by the work that there is"


def rollouts_leave_somebody(documents: Documents) -> Iterator[str]:
    """Without a surge one goes before its successor comes. Where nothing scales, the owner has said how many there
    are (one in overlays/local, which has no room for two). Without drafters only speed is lost."""
    scaled = [d["spec"] for d in documents if d["kind"] == "ScaledObject"]
    least = {_scaled(spec["scaleTargetRef"]): spec["minReplicaCount"] for spec in scaled}
    for workload in roles(documents):
        if workload.role != "drafter" and not workload.surge and least.get(workload.owner, 2) < 2:
            yield f"{workload.name}: a rollout would leave nobody to serve"


def lost_nodes_are_left_soon(documents: Documents) -> Iterator[str]:
    """Kubernetes keeps pods of a node that does not answer for 300 s, unless they say less for both of its taints."""
    for workload in (each for each in workloads(documents) if each.reads_settings_of):
        given = {each.get("key"): each for each in workload.spec.get("tolerations", [])}
        for state in ("not-ready", "unreachable"):
            wanted = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_S}
            if given.get(key := f"node.kubernetes.io/{state}") != {"key": key, **wanted}:
                yield f"{workload.name} stays on a node that is {state}"


def roles_have_budgets(documents: Documents) -> Iterator[str]:
    """Where there are any, each its own: with one for several, a pod of one that waits for a node counts as away, and
    the others' nodes cannot be drained."""
    budgets = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "PodDisruptionBudget"}
    covered: dict[str, str] = {}
    for workload in roles(documents) if budgets else []:
        labels = workload.labels.items()
        matching = [name for name, spec in budgets.items() if spec["selector"]["matchLabels"].items() <= labels]
        if len(matching) != 1:  # an eviction that two budgets cover fails
            yield f"{workload.name} has {len(matching)} disruption budgets"
        elif covered.setdefault(matching[0], workload.name) != workload.name:
            yield f"{workload.name} and {covered[matching[0]]} share a disruption budget"
