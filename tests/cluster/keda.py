"""KEDA's own operator and metrics adapter as processes of this machine (`make keda` builds them)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.api import wait
from tests.cluster.autoscaler import GROUP, METRICS_PORT, START_S, external_metrics, prometheus
from tests.cluster.cluster import PATIENCE, Cluster
from tests.cluster.programs import ASSETS, program
from tests.support.certificates import Authority

OPERATOR, ADAPTER, KINDS = "keda", "keda-adapter", "keda-crds"
"""Two programs and a folder beside those of the control plane."""
SERVICE_PORT = 9666
READERS = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "external-metrics"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:anonymous"}],
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
            log = stack.enter_context((cluster.folder / f"{name}.log").open("wb"))
            own = {
                "KEDA_CLUSTER_OBJECT_NAMESPACE": "kube-system",
                "POD_NAMESPACE": "kube-system",
                "WATCH_NAMESPACE": "",
                "POD_NAME": name,
                "OPERATOR_NAME": name,
            }
            words = [program(name), *options]
            process = subprocess.Popen(words, env=cluster.environment | own, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)

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
