"""A stand-in for a cluster's API server, enough for kubectl and helm: discovery, server-side apply, create, get, list.

It refuses what a real one refuses before any controller acts: kinds without a definition, objects of a namespace that
is not there, fields that the schemas of Kubernetes do not have. With `dryRun` it stores nothing. It runs no pods and
reports all of them as running.
"""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

VERSION = "1.32"
NATIVE = {
    "v1": {
        "Namespace": "namespaces",
        "ConfigMap": "configmaps",
        "Secret": "secrets",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
        "PersistentVolumeClaim": "persistentvolumeclaims",
    },
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "scheduling.k8s.io/v1": {"PriorityClass": "priorityclasses"},
}
"""What every cluster has: plurals by kind, by API version."""
CUSTOM = {
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "cert-manager.io/v1": {"Certificate": "certificates", "Issuer": "issuers"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
}
"""What operators define."""
OF_THE_CLUSTER = ("Namespace", "PriorityClass")
Object = dict[str, Any]


class Key(NamedTuple):
    namespace: str
    kind: str
    name: str


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Cluster:
    """What is stored, and what is defined."""

    def __init__(self, *definitions: Mapping[str, Mapping[str, str]]) -> None:
        self.kinds: dict[str, dict[str, str]] = {}
        for each in definitions:
            self.kinds |= {version: dict(kinds) for version, kinds in each.items()}
        self.objects: dict[Key, Object] = {}
        self._lock = threading.Lock()

    def names(self, kind: str) -> set[str]:
        return {key.name for key in self.objects if key.kind == kind}

    def store(self, version: str, namespace: str, given: Object, dry: bool) -> Object:
        """Raises Refused."""
        kind, name = given["kind"], given["metadata"]["name"]
        if namespace and Key("", "Namespace", namespace) not in self.objects:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if version in NATIVE and (fault := _fault(json.dumps(given, sort_keys=True))):
            raise Refused(400, "BadRequest", f"{kind} {name}: {fault}")
        made = given | {"metadata": given["metadata"] | {"uid": name, "resourceVersion": "1", "generation": 1}}
        made["metadata"] |= {"namespace": namespace} if namespace else {}
        made["status"] = _status(kind, given.get("spec", {}).get("replicas", 1))
        if not dry:
            with self._lock:
                self.objects[Key(namespace, kind, name)] = made
        return made

    def answer(self, method: str, path: str, query: Mapping[str, list[str]], body: Object | None) -> Object:
        """Raises Refused."""
        if (discovered := self._discovery(path)) is not None:
            return discovered
        parts = path.strip("/").split("/")
        version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = {plural: kind for kind, plural in self.kinds.get(version, {}).items()}.get("".join(rest[:1]))
        if kind is None:
            raise Refused(404, "NotFound", f"the server has no {path}")
        if body is not None and method != "DELETE":
            return self.store(version, namespace, body, "dryRun" in query)
        if len(rest) == 1:
            return {
                "kind": f"{kind}List",
                "apiVersion": version,
                "metadata": {},
                "items": self._list(namespace, kind, query),
            }
        if (key := Key(namespace, kind, rest[1])) not in self.objects:
            raise Refused(404, "NotFound", f'{rest[0]} "{rest[1]}" not found')
        return self.objects.pop(key) if method == "DELETE" else self.objects[key]

    def _list(self, namespace: str, kind: str, query: Mapping[str, list[str]]) -> list[Object]:
        labels = {pair for selector in query.get("labelSelector", []) for pair in selector.split(",")}
        named = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
        return [
            each
            for key, each in self.objects.items()
            if (key.namespace, key.kind) == (namespace, kind)
            and named in ("", key.name)
            and labels <= {"=".join(pair) for pair in each["metadata"].get("labels", {}).items()}
        ]

    def _discovery(self, path: str) -> Object | None:
        """What there is to ask for; None for a path of objects."""
        roots = {f"/{_root(version)}": version for version in self.kinds}
        if path in roots:
            version = roots[path]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": _resources(self.kinds[version])}
        if path.startswith("/openapi/v3/"):
            return self._openapi(path.removeprefix("/openapi/v3/"))
        documents: dict[str, Object] = {
            "/version": {"major": "1", "minor": VERSION.partition(".")[2], "gitVersion": f"v{VERSION}.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(v) for v in self.kinds if "/" in v],
            },
            "/openapi/v3": {
                "paths": {root.strip("/"): {"serverRelativeURL": f"/openapi/v3{root}"} for root in roots},
            },
        }
        return documents.get(path)

    def _openapi(self, root: str) -> Object:
        """As much as kubectl asks: that PATCH checks fields, and knows dry runs."""
        version = root.removeprefix("apis/").removeprefix("api/")
        group, _, number = version.rpartition("/")
        parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldManager", "fieldValidation", "force")]
        paths = {
            f"/{root}/{plural}/{{name}}": {
                "patch": {
                    "parameters": parameters,
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                }
            }
            for kind, plural in self.kinds[version].items()
        }
        return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": paths}


@cache
def _fault(given: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(given), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


def _status(kind: str, replicas: int) -> Object:
    """As if all pods ran."""
    if kind == "Job":
        return {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
    if kind in ("Deployment", "StatefulSet"):
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        return {"observedGeneration": 1, **dict.fromkeys(counts, replicas)}
    return {}


def _root(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _group(version: str) -> Object:
    named = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}


def _resources(kinds: Mapping[str, str]) -> list[Object]:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return [
        {"name": plural, "singularName": "", "namespaced": kind not in OF_THE_CLUSTER, "kind": kind, "verbs": verbs}
        for kind, plural in kinds.items()
    ]


def _object(sent: bytes) -> Object | None:
    """A body in YAML, JSON, or for `kubectl create` protobuf, of which a Namespace or a Secret is read."""
    if not sent.startswith(b"k8s\0"):
        return yaml.load(sent, yaml.CSafeLoader) if sent else None
    unknown = _fields(sent[4:])  # k8s.io/apimachinery/pkg/runtime/generated.proto
    version, kind = (_fields(unknown[1][0])[number][0].decode() for number in (1, 2))
    raw = _fields(unknown[2][0])
    made: Object = {"apiVersion": version, "kind": kind, "metadata": {"name": _fields(raw[1][0])[1][0].decode()}}
    if kind == "Secret":
        entries = [_fields(each) for each in raw.get(2, [])]
        made["data"] = {each[1][0].decode(): b64encode(each[2][0]).decode() for each in entries}
    return made


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Strings, bytes and messages by number; numbers are left out."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        size = varint()
        if kind == 2:
            found.setdefault(number, []).append(message[at : at + size])
            at += size
    return found


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            url = urlsplit(self.path)
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            code = 200
            if url.path == "/openapi/v2":  # which older clients want as protobuf; an empty message knows no kind
                self._send(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
                return
            if "watch" in parse_qs(url.query):  # nothing changes
                self._send(200, b"", "application/json")
                return
            try:
                answer = cluster.answer(self.command, url.path, parse_qs(url.query), _object(sent))
            except Refused as refused:
                code = refused.code
                answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
                answer |= {"reason": refused.reason, "message": str(refused)}
            self._send(code, json.dumps(answer).encode(), "application/json")

        def _send(self, code: int, answer: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    return Handler


@contextmanager
def served(cluster: Cluster, folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which kubectl and helm find the cluster; what they write goes to the folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cluster))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "current-context": "c",
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    (folder / "kubeconfig").chmod(0o600)
    try:
        yield {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder), "KUBECACHEDIR": str(folder / "cache")}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
