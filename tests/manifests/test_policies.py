"""Every overlay, and every component on the base, renders and keeps to every policy; and each policy can be broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.manifests.limits import (
    disks_have_room_for_what_is_written,
    limits_are_set,
    stores_have_room_for_their_log,
)
from tests.manifests.policies import (
    POLICIES,
    Policy,
    balancers_send_nothing_to_closed_ports,
    certificates_prove_roles,
    clients_come_by_grpc_and_http,
    gateways_find_their_workers,
    images_have_versions,
    names_are_settings,
    no_tokens_and_no_links,
    nobody_has_privileges,
    nobody_is_root,
    ports_are_where_settings_say,
    probes_are_set,
    starts_are_waited_for,
    targets_have_no_labels_of_metrics,
    the_namespace_is_restricted,
    there_is_time_to_drain,
)
from tests.manifests.rendering import (
    COMPONENTS,
    K8S,
    NEEDS,
    OVERLAYS,
    Document,
    amount,
    compose,
    containers,
    environment,
    find,
    render,
    roles,
    workloads,
)
from tests.manifests.scaling import (
    lost_nodes_are_left_soon,
    only_one_owner_of_replicas,
    roles_have_budgets,
    rollouts_leave_somebody,
    scaling_is_by_work_and_slow_to_shrink,
)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_to_every_policy(overlay: str) -> None:
    documents = render(K8S / overlay)
    assert {workload.role for workload in roles(documents)} == {"gateway", "verifier", "drafter"}
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_alone_keeps_to_every_policy(component: str, tmp_path: Path) -> None:
    documents = compose(tmp_path, [*NEEDS.get(component, []), component])
    assert documents != render(K8S / "base")
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []


@pytest.mark.parametrize("order", [1, -1])
def test_models_are_waited_for_whatever_the_order_of_components(order: int, tmp_path: Path) -> None:
    documents = compose(tmp_path, ["gpu-verifier", *["multi-gpu-verifier", "model-cache"][::order]])
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []


def test_pods_of_a_group_are_the_deployment_s_and_differ_in_what_a_follower_does(tmp_path: Path) -> None:
    """Whatever components came before; the options of both expand to what vLLM calls their places."""
    before = ["gpu-verifier", "model-cache", "mtls", "multi-gpu-verifier"]
    (tmp_path / "one").mkdir()
    one = find(compose(tmp_path / "one", before), "Deployment", "verifier")["spec"]["template"]
    documents = compose(tmp_path, [*before, "multi-node-verifier"])
    assert ("Deployment", "verifier") not in {(each["kind"], each["metadata"]["name"]) for each in documents}
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []
    leader, follower = (each for each in workloads(documents) if each.kind == "LeaderWorkerSet")
    group = leader.document["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in (leader, follower):
        (container,) = pod.spec["containers"]
        values = environment(container, documents)
        options = values["VERIFIER_VLLM_ARGS"].split()
        named = dict(zip(options[::2], options[1::2], strict=True))
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert int(named["--tensor-parallel-size"]) == gpus * group["size"]
        assert named["--nnodes"] == "$(LWS_GROUP_SIZE)" and named["--node-rank"] == "$(LWS_WORKER_INDEX)"
        assert named["--master-addr"] == "$(LWS_LEADER_ADDRESS)"
        assert pod.spec["volumes"] == one["spec"]["volumes"]
        assert container["image"] == one["spec"]["containers"][0]["image"]
    assert leader.spec["containers"][0].keys() == one["spec"]["containers"][0].keys()
    assert follower.spec["containers"][0]["command"] == ["python3", "-m", "verifier_svc.vllm_follower"]
    service = find(documents, "Service", "verifier")["spec"]["selector"].items()
    assert service <= leader.labels.items() and not service <= follower.labels.items()


def test_groups_are_scaled_where_autoscaling_and_several_nodes_meet(tmp_path: Path) -> None:
    """Without the component that joins them, what is scaled is not there."""
    before = ["gpu-verifier", "multi-gpu-verifier", "autoscaling", "multi-node-verifier"]
    (tmp_path / "apart").mkdir()
    apart = compose(tmp_path / "apart", before)
    assert "Deployment verifier is scaled and is not there" in set(only_one_owner_of_replicas(apart))
    documents = compose(tmp_path, [*before, "multi-node-autoscaling"])
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []
    spec = find(documents, "ScaledObject", "verifier")["spec"]
    assert spec["scaleTargetRef"]["kind"] == "LeaderWorkerSet" and spec["minReplicaCount"] == 2
    assert len(spec["triggers"]) == len(find(apart, "ScaledObject", "verifier")["spec"]["triggers"]) == 2


def test_a_laptop_of_two_cores_has_room_for_the_local_overlay() -> None:
    """kind's own pods reserve 950m; nothing is fetched, and a rollout needs no more than is there."""
    documents = render(K8S / "overlays/local")
    reserved = [container["resources"]["requests"] for _, container in containers(documents)]
    assert sum(amount(each["cpu"]) for each in reserved) <= 2 - 0.95
    assert sum(amount(each["memory"]) for each in reserved) <= 3 * 2**30
    for workload in roles(documents):
        assert workload.document["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
        assert workload.spec["containers"][0]["imagePullPolicy"] == "Never"


def container(document: Document) -> Document:
    first: Document = document["spec"]["template"]["spec"]["containers"][0]
    return first


def temporary(document: Document) -> Document:
    found: Document
    (found,) = (volume["emptyDir"] for volume in pod(document)["volumes"] if volume["name"] == "tmp")
    return found


def labels(document: Document) -> dict[str, str]:
    found: dict[str, str] = document["metadata"]["labels"]
    return found


def env(document: Document, name: str, value: str | None) -> None:
    entries = container(document)["env"]
    entries[:] = [entry for entry in entries if entry["name"] != name]
    if value is not None:
        entries.append({"name": name, "value": value})


def pod(document: Document) -> Document:
    spec: Document = document["spec"]["template"]["spec"]
    return spec


def option(document: Document, name: str, value: str) -> None:
    args = container(document)["args"]
    args[args.index(name) + 1] = value


Mutation = Callable[[Document], Any]
STORE, NAMESPACE = ("StatefulSet", "redis"), ("Namespace", "slipstream")
GATEWAY, VERIFIER, DRAFTER = ("Deployment", "gateway"), ("Deployment", "verifier"), ("Deployment", "drafter-model")
MUTANTS: list[tuple[Policy, tuple[str, str], Mutation]] = [
    (names_are_settings, GATEWAY, lambda d: env(d, "GATEWAY_VERIFIER", "verifier:50071")),
    (names_are_settings, GATEWAY, lambda d: env(d, "VERIFIER_MODEL", "x")),
    (names_are_settings, GATEWAY, lambda d: env(d, "GATEWAY_TOKENIZER", None)),
    (names_are_settings, VERIFIER, lambda d: env(d, "VERIFIER_MODEL", None)),
    (names_are_settings, DRAFTER, lambda d: env(d, "DRAFTER_MODEL", None)),
    (names_are_settings, DRAFTER, lambda d: env(d, "DRAFTER_THREADS", "many")),
    (names_are_settings, DRAFTER, lambda d: env(d, "SLIPSTREAM_TLS_FOLDR", "/tls")),
    (names_are_settings, DRAFTER, lambda d: env(d, "SLIPSTREAM_TRACE_FOLDR", "/traces")),
    (names_are_settings, GATEWAY, lambda d: env(d, "OTEL_TRACES_SAMPLR_ARG", "0.05")),
    (nobody_is_root, VERIFIER, lambda d: pod(d)["securityContext"].update(runAsUser=0)),
    (nobody_is_root, VERIFIER, lambda d: pod(d)["securityContext"].pop("seccompProfile")),
    (nobody_is_root, VERIFIER, lambda d: pod(d).update(hostNetwork=True)),
    (nobody_is_root, VERIFIER, lambda d: pod(d)["volumes"].append({"name": "x", "hostPath": {"path": "/"}})),
    (nobody_has_privileges, ("Job", "model-cache"), lambda d: container(d)["securityContext"].update(privileged=True)),
    (nobody_has_privileges, VERIFIER, lambda d: container(d)["securityContext"].update(runAsUser=0)),
    (
        nobody_has_privileges,
        VERIFIER,
        lambda d: container(d)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
    (nobody_has_privileges, VERIFIER, lambda d: container(d)["securityContext"].pop("readOnlyRootFilesystem")),
    (no_tokens_and_no_links, GATEWAY, lambda d: pod(d).pop("enableServiceLinks")),
    (no_tokens_and_no_links, GATEWAY, lambda d: pod(d).pop("automountServiceAccountToken")),
    (no_tokens_and_no_links, GATEWAY, lambda d: pod(d).pop("serviceAccountName")),
    (images_have_versions, GATEWAY, lambda d: container(d).update(image="slipstream/gateway:latest")),
    (images_have_versions, GATEWAY, lambda d: container(d).update(image="registry:5000/gateway")),
    (limits_are_set, ("Deployment", "jaeger"), lambda d: container(d)["resources"]["limits"].pop("memory")),
    (limits_are_set, GATEWAY, lambda d: container(d)["resources"]["requests"].pop("ephemeral-storage")),
    (disks_have_room_for_what_is_written, GATEWAY, lambda d: temporary(d).update(sizeLimit="2Gi")),
    (the_namespace_is_restricted, NAMESPACE, lambda d: labels(d).pop("pod-security.kubernetes.io/audit")),
    (the_namespace_is_restricted, NAMESPACE, lambda d: labels(d).pop("pod-security.kubernetes.io/enforce-version")),
    (probes_are_set, GATEWAY, lambda d: container(d).pop("readinessProbe")),
    (probes_are_set, GATEWAY, lambda d: container(d)["livenessProbe"]["grpc"].pop("service")),
    (probes_are_set, GATEWAY, lambda d: container(d)["readinessProbe"]["grpc"].update(port=50051)),
    (probes_are_set, ("Deployment", "jaeger"), lambda d: container(d).pop("livenessProbe")),
    (ports_are_where_settings_say, DRAFTER, lambda d: env(d, "DRAFTER_HEALTH_LISTEN", "0.0.0.0:1")),
    (ports_are_where_settings_say, GATEWAY, lambda d: env(d, "GATEWAY_HTTP", "0.0.0.0:1")),
    (clients_come_by_grpc_and_http, ("Service", "clients"), lambda d: d["spec"]["ports"].pop()),
    (clients_come_by_grpc_and_http, ("Service", "gateway"), lambda d: d["spec"]["ports"].pop()),
    (there_is_time_to_drain, VERIFIER, lambda d: env(d, "VERIFIER_GRACE_S", "87")),
    (there_is_time_to_drain, GATEWAY, lambda d: env(d, "GATEWAY_STORE_GRACE_S", "30")),
    (there_is_time_to_drain, GATEWAY, lambda d: container(d).pop("lifecycle")),
    (balancers_send_nothing_to_closed_ports, GATEWAY, lambda d: env(d, "GATEWAY_GRACE_S", None)),
    (
        balancers_send_nothing_to_closed_ports,
        GATEWAY,
        lambda d: container(d)["lifecycle"]["preStop"]["sleep"].update(seconds=5),
    ),
    (starts_are_waited_for, ("Deployment", "drafter-ngram"), lambda d: d["spec"].update(progressDeadlineSeconds=60)),
    (starts_are_waited_for, VERIFIER, lambda d: d["spec"].update(progressDeadlineSeconds=3900)),  # the cache's alone
    (starts_are_waited_for, GATEWAY, lambda d: d["spec"].update(progressDeadlineSeconds=5000)),  # not a verifier's
    (rollouts_leave_somebody, ("ScaledObject", "verifier"), lambda d: d["spec"].update(minReplicaCount=1)),
    (only_one_owner_of_replicas, VERIFIER, lambda d: d["spec"].update(replicas=3)),
    (only_one_owner_of_replicas, VERIFIER, lambda d: d["metadata"].update(name="checker")),
    (
        scaling_is_by_work_and_slow_to_shrink,
        ("ScaledObject", "verifier"),
        lambda d: d["spec"]["triggers"][0]["metadata"].update(query="avg(DCGM_FI_DEV_GPU_UTIL)"),
    ),
    (
        scaling_is_by_work_and_slow_to_shrink,
        ("ScaledObject", "gateway"),
        lambda d: d["spec"]["triggers"][0]["metadata"].update(query="sum(slipstream_gateway_session)"),
    ),
    (scaling_is_by_work_and_slow_to_shrink, ("ScaledObject", "gateway"), lambda d: d["spec"].pop("fallback")),
    (
        scaling_is_by_work_and_slow_to_shrink,
        ("ScaledObject", "gateway"),
        lambda d: d["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"].update(
            stabilizationWindowSeconds=0
        ),
    ),
    (
        roles_have_budgets,
        ("PodDisruptionBudget", "drafter-model"),
        lambda d: d["spec"]["selector"].update(matchLabels={"app.kubernetes.io/component": "drafter"}),
    ),
    (
        roles_have_budgets,
        ("PodDisruptionBudget", "drafter-ngram"),
        lambda d: d["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/name": "drafter"}),
    ),
    (lost_nodes_are_left_soon, VERIFIER, lambda d: pod(d)["tolerations"].pop(1)),
    (lost_nodes_are_left_soon, GATEWAY, lambda d: pod(d)["tolerations"][0].update(tolerationSeconds=300)),
    (stores_have_room_for_their_log, STORE, lambda d: option(d, "--save", "60 1")),
    (stores_have_room_for_their_log, STORE, lambda d: option(d, "--appendonly", "no")),
    (stores_have_room_for_their_log, STORE, lambda d: option(d, "--maxmemory", "768mb")),
    (stores_have_room_for_their_log, STORE, lambda d: container(d)["readinessProbe"]["exec"]["command"].remove("-e")),
    (
        targets_have_no_labels_of_metrics,
        ("PodMonitor", "slipstream"),
        lambda d: d["spec"]["podMetricsEndpoints"][0].update(relabelings=[{"targetLabel": "role"}]),
    ),
    (
        certificates_prove_roles,
        ("Certificate", "drafter"),
        lambda d: d["spec"]["dnsNames"].append("gateway.slipstream"),
    ),
    (certificates_prove_roles, DRAFTER, lambda d: env(d, "SLIPSTREAM_TLS_FOLDER", None)),
    (certificates_prove_roles, DRAFTER, lambda d: env(d, "SLIPSTREAM_TLS_DOMAIN", "other")),
    (certificates_prove_roles, GATEWAY, lambda d: env(d, "GATEWAY_TLS_FOLDER", None)),
    (gateways_find_their_workers, ("Service", "verifier"), lambda d: d["spec"].pop("clusterIP")),
    (gateways_find_their_workers, ("Service", "verifier"), lambda d: d["spec"]["ports"][0].update(port=1)),
    (gateways_find_their_workers, GATEWAY, lambda d: env(d, "GATEWAY_DRAFTERS", "model=dns:///verifier:50071")),
    (gateways_find_their_workers, GATEWAY, lambda d: env(d, "GATEWAY_VERIFIERS", "verifier:50071")),
]


@pytest.mark.parametrize(("policy", "which", "mutate"), MUTANTS)
def test_a_violation_of_a_policy_is_reported(policy: Policy, which: tuple[str, str], mutate: Mutation) -> None:
    documents = render(K8S / ("base" if which == STORE else "overlays/production"))  # whose Redis is another's
    mutate(find(documents, *which))
    assert list(policy(documents))


def test_every_policy_has_a_mutant() -> None:
    assert {policy for policy, _, _ in MUTANTS} == set(POLICIES)
