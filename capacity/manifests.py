"""`slipstream plan --manifests`: a plan's bounds and thresholds, for the chart and for kustomize."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capacity import report
from capacity.scenario import Scenario
from capacity.sizing import FleetPlan
from slipstream.errors import InvalidArgument

CAP = 2.0
"""Sessions that a pod takes at most, as a multiple of those that it is to bear: what is beyond waits or comes again."""
LEAST_VERIFIERS = 2
"""On GPUs a rollout takes one away before its successor comes."""
CO_LOCATED = "co-located"
Patch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the pods of one Deployment."""

    most_pods: int
    threshold: int
    """Sessions, or sessions that need a drafter, at which there is to be another pod."""
    most_sessions: int


@dataclass(frozen=True, slots=True)
class Scaling:
    verifier: Bounds
    drafter: Bounds | None
    """None: without speculation, or where the plan was not simulated."""
    speculates: bool


def share_that_is_used(cold_start_s: float, doubling_s: float) -> float:
    """Share of what a pod bears that is used, so that traffic which doubles in `doubling_s` seconds at the fastest is
    borne until the next pod is ready."""
    return float(2.0 ** (-cold_start_s / doubling_s))


def scaling(plan: FleetPlan, share: float) -> Scaling:
    """`share`: see `share_that_is_used`. Raises InvalidArgument where no fleet is within the objectives."""
    figures = report.row(plan)
    planned, needed = figures["scale_verifiers_at"], figures["scale_drafters_at"]
    if not plan.verifiers or not isinstance(planned, float):
        raise InvalidArgument("no manifests: no way to serve meets this SLO.")
    verifier = Bounds(
        max(LEAST_VERIFIERS, math.ceil(plan.verifiers / share)),
        max(1, math.floor(share * planned)),
        max(2, math.ceil(CAP * planned)),
    )
    drafter = None
    if plan.drafters and isinstance(needed, float):
        sessions = planned * plan.verifiers / plan.drafters
        most = max(1, math.ceil(plan.drafters / share))
        drafter = Bounds(most, max(1, math.floor(share * needed)), max(2, math.ceil(CAP * sessions)))
    return Scaling(verifier, drafter, plan.drafters > 0)


def chosen(plans: Sequence[FleetPlan]) -> FleetPlan:
    """The cheapest that these manifests can serve: drafters have pods of their own, or there are none."""
    return next(plan for plan in plans if plan.mode.name != CO_LOCATED)


def write(folder: Path, given: Scenario, plans: Sequence[FleetPlan], share: float) -> None:
    """`values.yaml` and `kustomization.yaml`. JSON is YAML, and needs no library here. Raises InvalidArgument."""
    plan = chosen(plans)
    found = scaling(plan, share)
    head = f"# {given.name}, {given.traffic.volume}: {plan.mode.name}, by `slipstream plan --manifests`.\n"
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("values", values(given, found)), ("kustomization", component(given, found))):
        (folder / f"{name}.yaml").write_text(head + json.dumps(made, indent=2) + "\n", "utf-8")


def values(given: Scenario, found: Scaling) -> Patch:
    """Values of the Helm chart."""
    scaled: Patch = {"verifier": _scaled(found.verifier, "sessions")}
    if found.drafter is not None:
        scaled["drafter-model"] = _scaled(found.drafter, "needed")
    deployments = {name: {"env": env} for name, env in _environments(given, found).items()}
    lookups = {} if found.speculates else {"drafters": {"model": False}}
    return {"autoscaling": scaled, "deployments": deployments, **lookups}


def _scaled(bounds: Bounds, trigger: str) -> Patch:
    return {"maxReplicas": bounds.most_pods, "thresholds": {trigger: bounds.threshold}}


def component(given: Scenario, found: Scaling) -> Patch:
    """A component for kustomize, to be listed after `autoscaling`."""
    patches = [_scaled_object("verifier", found.verifier, "sessions")]
    if found.drafter is not None:
        patches.append(_scaled_object("drafter-model", found.drafter, "needed"))
    for name, env in _environments(given, found).items():
        entries = [{"name": variable, "value": value} for variable, value in env.items()]
        container = {"name": "drafter" if name.startswith("drafter") else name, "env": entries}
        pod = {"spec": {"template": {"spec": {"containers": [container]}}}}
        patches.append(_patch({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, **pod}))
    return {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "patches": patches}


def _scaled_object(name: str, bounds: Bounds, trigger: str) -> Patch:
    """The trigger is the first one of its ScaledObject; where it is not, kustomize ends with that."""
    operations = [
        {"op": "replace", "path": "/spec/maxReplicaCount", "value": bounds.most_pods},
        {"op": "test", "path": "/spec/triggers/0/name", "value": trigger},
        {"op": "replace", "path": "/spec/triggers/0/metadata/threshold", "value": str(bounds.threshold)},
    ]
    return {"target": {"kind": "ScaledObject", "name": name}, "patch": json.dumps(operations)}


def _patch(merged: Patch) -> Patch:
    return {"patch": json.dumps(merged)}


def _environments(given: Scenario, found: Scaling) -> dict[str, dict[str, str]]:
    """Variables by Deployment."""
    environments = {
        "gateway": {
            "GATEWAY_SLO_TTFT_S": f"{given.slo.ttft_p95_s:g}",
            "GATEWAY_SLO_TPOT_S": f"{given.slo.tpot_p95_s:g}",
            "GATEWAY_VERIFIER_PRICE": f"{given.prices.verifier:g}",
        },
        "verifier": {"VERIFIER_MAX_SESSIONS": str(found.verifier.most_sessions)},
    }
    if found.speculates:
        environments["gateway"]["GATEWAY_DRAFTER_PRICES"] = f"model={given.prices.drafter:g}"
    if found.drafter is not None:
        environments["drafter-model"] = {"DRAFTER_MAX_SESSIONS": str(found.drafter.most_sessions)}
    return environments
