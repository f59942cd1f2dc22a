"""What every manifest must keep to. Each policy yields a sentence for everything that does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drafter_svc.config import DrafterConfig
from gateway.config import GatewayConfig
from gateway.gateway import FAREWELL_S
from slipstream.config import from_env
from slipstream.rpc.tls import TlsConfig
from slipstream.rpc.worker_service import LAST_SEND_S
from slipstream.telemetry.metrics import DECLARED
from slipstream.telemetry.span_exporters import TraceConfig
from tests.manifests.limits import (
    disks_have_room_for_what_is_written,
    limits_are_set,
    stores_have_room_for_their_log,
)
from tests.manifests.rendering import (
    ROOT,
    Document,
    Documents,
    Workload,
    containers,
    environment,
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
from verifier_svc.config import VerifierConfig

Policy = Callable[[Documents], Iterator[str]]
TRACING = (ROOT / "docs" / "tracing.md").read_text("utf-8")
CONFIGS: Mapping[str, type[GatewayConfig] | type[VerifierConfig] | type[DrafterConfig]] = {
    "gateway": GatewayConfig,
    "verifier": VerifierConfig,
    "drafter": DrafterConfig,
}
HUB = ("HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY")
TELEMETRY = re.findall(r"OTEL_\w+", "\n".join(re.findall(r"^\|.*?\|", TRACING, re.MULTILINE)))
"""The standard names that docs/tracing.md has a line for."""
POD = {"OTEL_POD_NAME", "OTEL_POD_UID", "OTEL_POD_NAMESPACE", "OTEL_NODE_NAME"}
"""Stand in OTEL_RESOURCE_ATTRIBUTES."""
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
OTHERS = frozenset(
    {
        *HUB,
        *CACHES,
        *TELEMETRY,
        *POD,
        "MODEL",
        "MODEL_REVISION",
        "JAEGER_FOLDER",
        "JAEGER_LISTEN_HOST",
        "KEEP_PERCENT",
        "STORE_PASSWORD",
        "VALKEYCLI_AUTH",
    }
)
"""Names that are not ours, or stand in other values."""
SHARED: Mapping[str, type[Any]] = {"SLIPSTREAM_TLS_": TlsConfig, "SLIPSTREAM_TRACE_": TraceConfig}
"""By prefix, what every role reads."""
FLUSH_S = 3.0
"""For telemetry's last words, after everything else."""
BALANCER_S, STREAM_S = 120, 300
"""Seconds until a balancer has noticed that a pod is not ready, and of a long stream."""
CACHE_S = 3600 + 300
"""The time that docs/deployment.md gives the download of a model, and the longest pause before a pod starts again."""


def settings(workload: Workload, documents: Documents) -> GatewayConfig | VerifierConfig | DrafterConfig:
    """Raises InvalidArgument for what the process would refuse."""
    values = environment(workload.spec["containers"][0], documents)
    role = workload.reads_settings_of
    return from_env(CONFIGS[role], f"{role.upper()}_", values)


def drain_s(workload: Workload, documents: Documents) -> float:
    """Seconds from SIGTERM to the end of the process at the latest."""
    config = settings(workload, documents)
    if isinstance(config, GatewayConfig):
        return config.grace_s + FAREWELL_S + (config.store_grace_s + 1.0) + config.store_grace_s + FLUSH_S
    return config.grace_s + LAST_SEND_S + FLUSH_S


def pre_stop_s(workload: Workload) -> int:
    """Seconds before SIGTERM."""
    hook = workload.spec["containers"][0].get("lifecycle", {}).get("preStop", {})
    return int(hook.get("sleep", {}).get("seconds", 0))


def names_are_settings(documents: Documents) -> Iterator[str]:
    """Every name is a setting of the role, and every setting that has no default is there."""
    for workload in (each for each in workloads(documents) if each.reads_settings_of):
        try:
            settings(workload, documents)
            for prefix, kind in SHARED.items():
                from_env(kind, prefix, environment(workload.spec["containers"][0], documents))
        except Exception as error:
            yield f"{workload.name}: {error}"
    for workload, container in containers(documents):
        for name in environment(container, documents):
            role = workload.reads_settings_of
            ours = role and name.startswith((f"{role.upper()}_", *SHARED))
            if not ours and name not in OTHERS:
                yield f"{workload.name}: {name} is nobody's setting"


def nobody_is_root(documents: Documents) -> Iterator[str]:
    for workload in workloads(documents):
        pod = workload.spec.get("securityContext", {})
        if pod.get("runAsNonRoot") is not True or pod.get("runAsUser", 10001) != 10001:  # OpenShift chooses
            yield f"{workload.name} may run as root"
        if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload.name} has no seccomp profile"
        if any(workload.spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{workload.name} lives in its node's namespaces"
        if any("hostPath" in volume for volume in workload.spec.get("volumes", [])):
            yield f"{workload.name} mounts its node's files"


def nobody_has_privileges(documents: Documents) -> Iterator[str]:
    for workload, container in containers(documents):
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield f"{workload.name} may gain privileges"
        if context.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{workload.name} keeps capabilities"
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{workload.name} may write to its image"
        if {"runAsUser", "runAsNonRoot", "seccompProfile"} & context.keys():
            yield f"{workload.name}: a container says otherwise than its pod"


def no_tokens_and_no_links(documents: Documents) -> Iterator[str]:
    for workload in workloads(documents):
        if workload.spec.get("automountServiceAccountToken") is not False:
            yield f"{workload.name} holds a token for the API server"
        if workload.spec.get("serviceAccountName", "default") == "default":
            yield f"{workload.name} has no account of its own"
        if workload.spec.get("enableServiceLinks") is not False:
            yield f"{workload.name} gets variables named after services, which are no settings"


def images_have_versions(documents: Documents) -> Iterator[str]:
    for workload, container in containers(documents):
        if not re.search(r":v?\d[^/]*$|@sha256:", container["image"]):
            yield f"{workload.name}: {container['image']} may be another one tomorrow"


def the_namespace_is_restricted(documents: Documents) -> Iterator[str]:
    """What is refused does not change with the cluster's version; what a newer one would refuse is told."""
    for document in documents:
        if document["kind"] == "Namespace":
            told = document["metadata"]["labels"]
            mode = "pod-security.kubernetes.io/"
            if {told.get(f"{mode}{each}") for each in ("enforce", "audit", "warn")} != {"restricted"}:
                yield "the namespace lets through, or does not tell of, what is not restricted"
            if not re.fullmatch(r"v1\.\d+", told.get(f"{mode}enforce-version", "")):
                yield "the namespace enforces another standard after an upgrade"


def probes_are_set(documents: Documents) -> Iterator[str]:
    """By gRPC on the port for them, where it is ours: start and life by liveness, readiness by whether to send work."""
    asked = {"startupProbe": "liveness", "livenessProbe": "liveness", "readinessProbe": ""}
    for workload in workloads(documents):
        if workload.kind == "Job" or workload.role != workload.reads_settings_of:  # a follower ends with its leader
            continue
        for container in workload.spec["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for kind, service in asked.items():
                probe = container.get(kind)
                if probe is None:
                    yield f"{workload.name} has no {kind}"
                elif workload.role and probe.get("grpc") != {"port": ports["health"]} | (
                    {"service": service} if service else {}
                ):
                    yield f"{workload.name}: the {kind} asks something else"


def ports_are_where_settings_say(documents: Documents) -> Iterator[str]:
    for workload in roles(documents):
        container = workload.spec["containers"][0]
        values = environment(container, documents)
        for port in container["ports"]:
            setting = {"grpc": "LISTEN", "http": "HTTP"}.get(port["name"], f"{port['name'].upper()}_LISTEN")
            if not values[f"{workload.role.upper()}_{setting}"].endswith(f":{port['containerPort']}"):
                yield f"{workload.name}: nobody listens on its port {port['name']}"


def clients_come_by_grpc_and_http(documents: Documents) -> Iterator[str]:
    for service in (each for each in documents if each["kind"] == "Service"):
        ours = service["spec"].get("selector", {}).get("app.kubernetes.io/name") == "gateway"
        if ours and {port["targetPort"] for port in service["spec"]["ports"]} != {"grpc", "http"}:
            yield f"{service['metadata']['name']} lets clients in by one protocol alone"


def there_is_time_to_drain(documents: Documents) -> Iterator[str]:
    for workload in roles(documents):
        sleep = pre_stop_s(workload)
        needed = sleep + drain_s(workload, documents)
        if workload.spec.get("terminationGracePeriodSeconds", 30) <= needed:
            yield f"{workload.name} is killed before the {needed:g} s that its end may take"
        if workload.role == "gateway" and not sleep:
            yield f"{workload.name} closes its port while clients still come"


def balancers_send_nothing_to_closed_ports(documents: Documents) -> Iterator[str]:
    """Clouds' balancers go on for up to two minutes, and whoever came by one cannot go on elsewhere."""
    balanced = [d["spec"]["selector"] for d in documents if d["kind"] == "Service" and _is_balancer(d)]
    for workload in roles(documents):
        if not any(selector.items() <= workload.labels.items() for selector in balanced):
            continue
        config = settings(workload, documents)
        if pre_stop_s(workload) < BALANCER_S or config.grace_s < STREAM_S:
            yield f"{workload.name} ends while a balancer still sends to it, or streams through it last"


def _is_balancer(service: Document) -> bool:
    return bool(service["spec"].get("type") == "LoadBalancer")


def starts_are_waited_for(documents: Documents) -> Iterator[str]:
    """A gateway is ready when a verifier is; who reads the model cache starts when that is filled."""
    found = roles(documents)
    for workload in found:
        if workload.kind == "LeaderWorkerSet":  # has no deadline
            continue
        waits = [each for each in found if each is workload or (workload.role, each.role) == ("gateway", "verifier")]
        cached = any(volume["name"] == "models" for volume in workload.spec["volumes"])
        longest = max(_start_s(each) for each in waits) + (CACHE_S if cached else 0)
        if workload.document["spec"].get("progressDeadlineSeconds", 600) <= longest:
            yield f"{workload.name}: a rollout is given up within the {longest} s that a start may take"


def _start_s(workload: Workload) -> int:
    probe = workload.spec["containers"][0]["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def targets_have_no_labels_of_metrics(documents: Documents) -> Iterator[str]:
    """Prometheus would rename the metric's, and no rule would find it."""
    taken = {label for metric in DECLARED for label in metric.labels}
    for document in documents:
        if document["kind"] == "PodMonitor":
            endpoints = document["spec"]["podMetricsEndpoints"]
            given = {each.get("targetLabel") for endpoint in endpoints for each in endpoint.get("relabelings", [])}
            for label in taken & (given | set(document["spec"].get("podTargetLabels", []))):
                yield f"{document['metadata']['name']}: {label} is a metric's own label"


def certificates_prove_roles(documents: Documents) -> Iterator[str]:
    """Where there are any: each role has one that names it and nobody else, and looks for it where it is."""
    names = {d["spec"]["secretName"]: d["spec"].get("dnsNames") for d in documents if d["kind"] == "Certificate"}
    for workload in roles(documents) if names else []:
        mounted = _mounted_secrets(workload)
        tls = from_env(TlsConfig, "SLIPSTREAM_TLS_", environment(workload.spec["containers"][0], documents))
        if names.get(mounted.get(tls.folder, "")) != [f"{workload.role}.{tls.domain}"]:
            yield f"{workload.name} cannot prove that it is a {workload.role}"
        config = settings(workload, documents)
        if isinstance(config, GatewayConfig) and mounted.get(config.tls_folder) not in names:
            yield f"{workload.name} has no certificate for clients"


def _mounted_secrets(workload: Workload) -> dict[str, str]:
    """Secrets by the folder that they are mounted at."""
    volumes: dict[str, Document] = {volume["name"]: volume for volume in workload.spec.get("volumes", [])}
    mounts = workload.spec["containers"][0].get("volumeMounts", [])
    found = {mount["mountPath"]: volumes[mount["name"]].get("secret", {}).get("secretName", "") for mount in mounts}
    return {path: name for path, name in found.items() if name}


def gateways_find_their_workers(documents: Documents) -> Iterator[str]:
    """Every name that they look up is a headless Service of such pods, on the port that it has."""
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    for workload in roles(documents):
        config = settings(workload, documents)
        if not isinstance(config, GatewayConfig):
            continue
        targets = [("verifier", target) for target in config.verifiers]
        targets += [("drafter", entry.partition("=")[2]) for entry in config.drafters]
        for role, target in targets:
            host, _, port = target.removeprefix("dns:///").rpartition(":")
            service = services.get(host, {})
            pods = [w for w in roles(documents) if service and service["selector"].items() <= w.labels.items()]
            if not target.startswith("dns:///") or service.get("clusterIP") != "None":
                yield f"{target} is not looked up pod by pod"
            elif [w.role for w in pods] != [role] or port not in {str(p["port"]) for p in service["ports"]}:
                yield f"{target} leads to no {role}"


POLICIES: tuple[Policy, ...] = (
    names_are_settings,
    nobody_is_root,
    nobody_has_privileges,
    no_tokens_and_no_links,
    images_have_versions,
    limits_are_set,
    disks_have_room_for_what_is_written,
    the_namespace_is_restricted,
    probes_are_set,
    ports_are_where_settings_say,
    clients_come_by_grpc_and_http,
    there_is_time_to_drain,
    balancers_send_nothing_to_closed_ports,
    starts_are_waited_for,
    rollouts_leave_somebody,
    only_one_owner_of_replicas,
    scaling_is_by_work_and_slow_to_shrink,
    roles_have_budgets,
    lost_nodes_are_left_soon,
    stores_have_room_for_their_log,
    targets_have_no_labels_of_metrics,
    certificates_prove_roles,
    gateways_find_their_workers,
)
