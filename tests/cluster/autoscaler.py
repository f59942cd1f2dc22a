"""KEDA's part, and Prometheus: an HPA for each ScaledObject as KEDA makes it, fed by what its queries find.

The HPAs are real, and so is the controller that reads them. It asks the API server for `external.metrics.k8s.io`, which
passes the question on to this process (an APIService with a Service that is only a name). KEDA's own operator does the
same with more kinds of triggers, and from zero on: `tests.cluster.keda`.
"""

from __future__ import annotations

import json
import math
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.cluster.api import Object, wait
from tests.cluster.cluster import APP, PATIENCE, Cluster
from tests.cluster.images import ROOT
from tests.cluster.programs import running
from tests.support.certificates import Authority

PROMETHEUS, METRICS_PORT = "http://127.0.0.1:9090", 6555
GROUP = "external.metrics.k8s.io/v1beta1"
START_S = 60.0
ASKED_S = 5.0
"""Between two looks at ScaledObjects, and between scrapes."""
CONFIG = """
global: {{scrape_interval: 5s, evaluation_interval: 5s}}
rule_files: [{rules}/recording.yaml]
scrape_configs:
  - {{job_name: pods, file_sd_configs: [{{files: [{targets}], refresh_interval: 5s}}]}}
"""
TARGETS = "targets.json"
"""In the cluster's folder. Debian's Prometheus looks up no pods by itself."""
ROLES = ("gateway", "verifier", "drafter")


@contextmanager
def autoscaling(cluster: Cluster) -> Iterator[None]:
    """Scales what ScaledObjects of the cluster name, as long as it lasts."""
    with ExitStack() as stack:
        stack.enter_context(prometheus(cluster))
        server = ThreadingHTTPServer(("127.0.0.1", METRICS_PORT), _handler(cluster))
        server.socket = _certificate(cluster.folder).wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        stack.enter_context(external_metrics(cluster))
        stack.enter_context(_repeated(_make_hpas, cluster))
        yield


@contextmanager
def external_metrics(cluster: Cluster) -> Iterator[None]:
    """The API server passes questions about external metrics on to METRICS_PORT of this machine."""
    _apply(cluster, *_way_to(METRICS_PORT))
    try:
        yield
    finally:  # an API without a server keeps every namespace from being deleted
        cluster.kubectl("delete", "apiservice", ".".join(reversed(GROUP.split("/"))))


@contextmanager
def _repeated(work: Callable[[Cluster], None], cluster: Cluster) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(ASKED_S):
            work(cluster)

    follower = threading.Thread(target=repeat, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


@contextmanager
def prometheus(cluster: Cluster) -> Iterator[None]:
    config = cluster.folder / "prometheus.yaml"
    config.write_text(CONFIG.format(rules=ROOT / "deploy" / "prometheus", targets=cluster.folder / TARGETS))
    options = (f"--config.file={config}", "--storage.tsdb.path=metrics", "--web.listen-address=127.0.0.1:9090")
    with running(cluster.folder, "prometheus", *options):
        wait(lambda: _answers(f"{PROMETHEUS}/-/ready"), f"Prometheus is ready ({config.parent})", START_S * PATIENCE)
        with _repeated(_write_targets, cluster):
            yield


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=ASKED_S):
            return True
    except OSError:
        return False


def _certificate(folder: Path) -> ssl.SSLContext:
    made = Authority().issue(folder / "metrics-certificate", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "tls.crt", made / "tls.key")
    return context


def _way_to(port: int) -> list[Object]:
    """What has the API server pass questions about external metrics on to this machine's port."""
    service = {"name": "metrics", "namespace": "kube-system"}
    group, _, version = GROUP.partition("/")
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": service,
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{version}.{group}"},
            "spec": {
                "group": group,
                "version": version,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {**service, "port": port},
            },
        },
    ]


def _apply(cluster: Cluster, *objects: Object) -> None:
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=listed)


def _targets(cluster: Cluster) -> list[Object]:
    """Pods of all roles that have an address, with the labels that PodMonitor `slipstream` gives them."""
    found: list[Object] = []
    for pod in cluster.api.items("/api/v1/pods"):
        labels, address = pod["metadata"]["labels"], pod["status"].get("podIP")
        ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0].get("ports", [])}
        if labels.get("app.kubernetes.io/component") in ROLES and address and "metrics" in ports:
            names = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"], "job": labels[APP]}
            found.append({"targets": [f"{address}:{ports['metrics']}"], "labels": names})
    return found


def _write_targets(cluster: Cluster) -> None:
    part = cluster.folder / f"{TARGETS}.part"
    part.write_text(json.dumps(_targets(cluster)))
    part.rename(cluster.folder / TARGETS)  # Prometheus reads it whole


def _make_hpas(cluster: Cluster) -> None:
    if found := cluster.api.items("/apis/keda.sh/v1alpha1/scaledobjects"):
        _apply(cluster, *map(hpa_of, found))


def hpa_of(scaled: Object) -> Object:
    spec, name = scaled["spec"], scaled["metadata"]["name"]
    selector = {"matchLabels": {"scaledobject.keda.sh/name": name}}
    metrics = [
        {
            "type": "External",
            "external": {
                "metric": {"name": f"s{number}-prometheus", "selector": selector},
                "target": {"type": trigger["metricType"], "averageValue": trigger["metadata"]["threshold"]},
            },
        }
        for number, trigger in enumerate(spec["triggers"])
    ]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": f"keda-hpa-{name}", "namespace": scaled["metadata"]["namespace"]},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": max(1, spec["minReplicaCount"]),
            "maxReplicas": spec["maxReplicaCount"],
            "metrics": metrics,
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }


def _value(cluster: Cluster, namespace: str, name: str, number: int) -> float:
    """Raises OSError or LookupError where there is none: an empty result is none (`ignoreNullValues: "false"`)."""
    scaled = cluster.api.call("GET", f"/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects/{name}")
    query = urllib.parse.urlencode({"query": scaled["spec"]["triggers"][number]["metadata"]["query"]})
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/query?{query}", timeout=ASKED_S) as answer:
        return float(json.load(answer)["data"]["result"][0]["value"][1])


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    group, _, version = GROUP.partition("/")

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            parts = url.path.strip("/").split("/")
            if parts[:4] == ["apis", group, version, "namespaces"]:
                self._metric(parts[4], parts[5], urllib.parse.parse_qs(url.query)["labelSelector"][0])
            elif url.path == f"/apis/{GROUP}":
                metric = {"name": "externalmetrics", "singularName": "", "namespaced": True, "verbs": ["get"]}
                listed = {"resources": [{**metric, "kind": "ExternalMetricValueList"}]}
                self._say(200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, **listed})
            else:
                self._say(404, {})

        def _metric(self, namespace: str, metric: str, selector: str) -> None:
            name, number = selector.partition("=")[2], int(metric[1:].partition("-")[0])
            try:
                value = _value(cluster, namespace, name, number)
            except (OSError, LookupError) as error:
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500}
                self._say(500, {**status, "message": repr(error)})
                return
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            item = {"metricName": metric, "metricLabels": {}, "timestamp": now, "value": f"{math.ceil(1000 * value)}m"}
            self._say(200, {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": [item]})

        def _say(self, code: int, body: Object) -> None:
            text = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Writes none."""

    return Metrics
