"""Examples of ways in from outside lead to the gateways' ports, gRPC by the services that they have."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from slipstream.v1 import gateway_pb2
from tests.manifests.rendering import K8S, ROOT, Document, find, render
from tests.manifests.test_schemas import VERSIONS

SERVICES = {f"/{each.full_name}" for each in gateway_pb2.DESCRIPTOR.services_by_name.values()} | {
    "/grpc.health.v1.Health"
}


def example(name: str) -> dict[str, list[Document]]:
    """By kind."""
    found: dict[str, list[Document]] = {}
    for document in yaml.safe_load_all((ROOT / "examples" / name).read_text("utf-8")):
        found.setdefault(document["kind"], []).append(document)
    return found


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    service = find(render(K8S / "overlays" / "standalone"), "Service", "gateway")
    return {each["name"]: each["port"] for each in service["spec"]["ports"]}


def paths(ingress: Document) -> list[tuple[str, dict[str, Any]]]:
    (rule,) = ingress["spec"]["rules"]
    return [(each["path"], each["backend"]["service"]) for each in rule["http"]["paths"]]


def test_an_ingress_sends_services_to_the_grpc_port_and_the_rest_to_http(ports: dict[str, int]) -> None:
    documents = {each["metadata"]["name"]: each for each in example("ingress.yaml")["Ingress"]}
    for document in documents.values():
        kubernetes_validate.validate(document, VERSIONS[1], strict=True)
    assert {path for path, _ in paths(documents["clients-grpc"])} == SERVICES
    assert [path for path, _ in paths(documents["clients-http"])] == ["/"]
    for name, protocol in (("grpc", "GRPC"), ("http", "HTTP")):
        document = documents[f"clients-{name}"]
        assert {each["port"]["name"] for _, each in paths(document)} == {name} <= ports.keys()
        assert {each["name"] for _, each in paths(document)} == {"gateway"}
        options = document["metadata"]["annotations"]
        assert options["nginx.ingress.kubernetes.io/backend-protocol"] == protocol
        assert int(options["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600  # a stream pauses while it waits


def test_routes_send_services_to_the_grpc_port_and_the_rest_to_http(ports: dict[str, int]) -> None:
    documents = example("routes.yaml")
    (grpc,), (http,), (policy,) = (documents[kind] for kind in ("GRPCRoute", "HTTPRoute", "BackendTLSPolicy"))
    matched = {f"/{each['method']['service']}" for each in grpc["spec"]["rules"][0]["matches"]}
    assert matched == SERVICES
    for route, name in ((grpc, "grpc"), (http, "http")):
        (backend,) = route["spec"]["rules"][0]["backendRefs"]
        assert (backend["name"], backend["port"]) == ("gateway", ports[name])
    certificate = find(render(K8S / "overlays" / "production"), "Certificate", "gateway-clients")["spec"]
    assert policy["spec"]["validation"]["hostname"] in certificate["dnsNames"]
    assert policy["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": "gateway"}]
