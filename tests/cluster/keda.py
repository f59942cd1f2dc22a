"""KEDA's own operator and metrics adapter as processes of this machine (`make keda` builds them)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.api import wait
from tests.cluster.autoscaler import GROUP, METRICS_PORT, START_S, external_metrics, prometheus
from tests.cluster.cluster import PATIENCE, Cluster
from tests.cluster.programs import ASSETS, program, running
from tests.support.certificates import Authority

OPERATOR, ADAPTER, KINDS = "keda", "keda-adapter", "keda-crds"
"""Two programs and a folder beside those of the control plane."""
SERVICE_PORT = 9666
IN_A_POD = {"KEDA_CLUSTER_OBJECT_NAMESPACE": "kube-system", "POD_NAMESPACE": "kube-system", "WATCH_NAMESPACE": ""}
RBAC = "rbac.authorization.k8s.io"
READERS = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "external-metrics"},
            "rules": [{"apiGroups": ["external.metrics.k8s.io"], "resources": ["*"], "verbs": ["get", "list"]}],
        },
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "external-metrics"},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "external-metrics"},
            "subjects": [{"apiGroup": RBAC, "kind": "User", "name": "system:anonymous"}],
        },
    ],
}


def absent() -> list[str]:
    """What of it is missing here."""
    found = []
    for name in (OPERATOR, ADAPTER):
        try:
            program(name)
        except KeyError:
            found.append(name)
    return found if _kinds().is_dir() else [*found, KINDS]


def _kinds() -> Path:
    return Path(os.environ.get(ASSETS, "/nonexistent")) / KINDS


@contextmanager
def keda(cluster: Cluster) -> Iterator[None]:
    """Scales what ScaledObjects of the cluster name, as long as it lasts."""
    certificates = Authority().issue(cluster.folder / "keda-certificates", "localhost")
    config = cluster.environment["KUBECONFIG"]
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", _kinds())
    with ExitStack() as stack:
        stack.enter_context(prometheus(cluster))

        def start(name: str, *options: str) -> None:
            own = {"POD_NAME": name, "OPERATOR_NAME": name, "KUBECONFIG": config}
            stack.enter_context(running(cluster.folder, name, *options, **IN_A_POD, **own))

        start(
            OPERATOR,
            f"--kubeconfig={config}",
            f"--cert-dir={certificates}",
            f"--metrics-service-bind-address=127.0.0.1:{SERVICE_PORT}",
            "--metrics-bind-address=127.0.0.1:6556",
            "--health-probe-bind-address=127.0.0.1:6557",
        )
        start(
            ADAPTER,
            f"--lister-kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--authentication-tolerate-lookup-failure",
            "--authorization-always-allow-paths=/*",
            f"--secure-port={METRICS_PORT}",
            "--port=6558",
            f"--cert-dir={certificates}",
            f"--tls-cert-file={certificates / 'tls.crt'}",
            f"--tls-private-key-file={certificates / 'tls.key'}",
            f"--metrics-service-address=localhost:{SERVICE_PORT}",
        )
        # The API server has no certificate by which KEDA's adapter would believe whom it asks for.
        cluster.kubectl("apply", "-f", "-", text=json.dumps(READERS))
        stack.enter_context(external_metrics(cluster))
        wait(lambda: _serves(cluster), f"KEDA serves metrics ({cluster.folder})", START_S * PATIENCE)
        yield


def _serves(cluster: Cluster) -> bool:
    try:
        return bool(cluster.api.call("GET", f"/apis/{GROUP}"))
    except OSError:
        return False
