"""Who may reach whom is the table of k8s/components/network-policies/README.md, no more and no less."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.manifests.reachability import Place, Port, may_reach, pods
from tests.manifests.rendering import K8S, Document, Documents, compose, find, render

OUTSIDE = {
    "a node": Place("10.0.0.9"),
    "the internet": Place("93.184.216.34"),
    "a stranger": Place("10.244.9.1", "default", {"app.kubernetes.io/component": "gateway"}),
    "Prometheus": Place("10.244.9.2", "monitoring"),
    "DNS": Place("10.244.9.3", "kube-system", {"k8s-app": "kube-dns"}),
    "NodeLocal DNS": Place("169.254.20.10"),
    "a NodeLocal pod": Place("10.244.9.4", "kube-system", {"k8s-app": "node-local-dns"}),
    "the cloud's DNS": Place("169.254.169.254"),
    "OpenShift's DNS": Place("10.244.9.5", "openshift-dns"),
    "an address of the settings": Place("192.0.2.1"),
}
TCP = (
    3128,
    8080,
    8000,
    50051,
    50052,
    50061,
    50062,
    50071,
    50072,
    9464,
    6379,
    4317,
    13133,
    16686,
    443,
    53,
    80,
    29500,
    5353,
)
PORTS: tuple[Port, ...] = (*((port, "TCP") for port in TCP), (53, "UDP"), (5353, "UDP"), (50071, "UDP"))
DNS = ["DNS", "NodeLocal DNS", "a NodeLocal pod", "the cloud's DNS"]
Reach = set[tuple[str, str, Port]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """All pods that there may be, with the Redis of the base."""
    names = ["lookup-drafters", "model-cache", "tracing", "network-policies"]
    return compose(tmp_path_factory.mktemp("all"), names)


def reach(documents: Documents) -> Reach:
    """What may be reached from our pods, or by others in them."""
    inside = pods(documents)
    places = inside | OUTSIDE
    return {
        (source, target, port)
        for source, target, port in itertools.product(places, places, PORTS)
        if source != target
        and (source in inside or target in inside)
        and may_reach(documents, places[source], places[target], port)
    }


def table() -> Reach:
    """The rows `| from | to | ports |` of the document; *outside* is who is in no pod of ours, *a pod* all of them."""
    text = (K8S / "components" / "network-policies" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| ([\d, A-Z/]+) \|$", text, re.MULTILINE)
    assert len(rows) > 8
    found: Reach = set()
    for sources, targets, ports in rows:
        pairs = itertools.product(_names(sources), _names(targets), re.findall(r"(\d+)(?:/(UDP))?", ports))
        found |= {(source, target, (int(port), kind or "TCP")) for source, target, (port, kind) in pairs}
    return found


def _names(text: str) -> list[str]:
    roles = {"drafter": ["drafter-model", "drafter-ngram", "drafter-suffix"]}
    ours = ["gateway", "verifier", *roles["drafter"], "redis", "otel-collector", "jaeger", "model-cache"]
    groups = roles | {"outside": list(OUTSIDE), "a pod": ours, "DNS": DNS}
    return [name for part in text.split(", ") for name in groups.get(part, [part])]


def test_pods_reach_each_other_as_documented(documents: Documents) -> None:
    assert set(_names("a pod")) == set(pods(documents))
    found, written = reach(documents), table()
    assert sorted(found - written) == [] and sorted(written - found) == []


def test_pods_of_a_group_reach_each_other_and_only_the_leader_is_reached_by_gateways(tmp_path: Path) -> None:
    documents = compose(tmp_path, ["gpu-verifier", "multi-gpu-verifier", "network-policies", "multi-node-verifier"])
    places = pods(documents)
    leader, follower, gateway = (places[name] for name in ("verifier-group leader", "verifier-group worker", "gateway"))
    for port in (29501, 29502, 40000):
        assert may_reach(documents, leader, follower, (port, "TCP"))
        assert may_reach(documents, follower, leader, (port, "TCP"))
        for stranger in (gateway, places["drafter-model"], *OUTSIDE.values()):
            assert not may_reach(documents, stranger, leader, (port, "TCP"))
            assert not may_reach(documents, stranger, follower, (port, "TCP"))
    assert may_reach(documents, gateway, leader, (50071, "TCP"))
    assert not may_reach(documents, gateway, follower, (50071, "TCP"))


def test_without_network_policies_any_pod_may_be_reached() -> None:
    documents = render(K8S / "overlays/local")
    assert may_reach(documents, OUTSIDE["a stranger"], pods(documents)["verifier"], (50071, "TCP"))


def allow(policy: str, direction: str, rule: Document) -> Callable[[Documents], Any]:
    return lambda documents: find(documents, "NetworkPolicy", policy)["spec"].setdefault(direction, []).append(rule)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda documents: documents.remove(find(documents, "NetworkPolicy", "default-deny")),
        lambda documents: documents.remove(find(documents, "NetworkPolicy", "names")),
        lambda documents: find(documents, "NetworkPolicy", "names")["spec"]["egress"][0].pop("ports"),
        lambda documents: find(documents, "NetworkPolicy", "drafter")["spec"].update(podSelector={}),
        lambda documents: find(documents, "NetworkPolicy", "verifier")["spec"]["ingress"][0].pop("from"),
        lambda documents: find(documents, "NetworkPolicy", "gateway")["spec"]["egress"][0].pop("ports"),
        allow("drafter", "ingress", {"from": [{"namespaceSelector": {}}]}),
        allow("default-deny", "egress", {}),
        allow("verifier", "egress", {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}),
        allow("store", "ingress", {"from": [{"namespaceSelector": {}}]}),
    ],
)
def test_a_changed_network_policy_is_detected(documents: Documents, mutate: Callable[[Documents], Any]) -> None:
    changed = copy.deepcopy(documents)
    mutate(changed)
    assert reach(changed) != reach(documents)


def test_pods_that_fetch_their_models_reach_the_internet_by_https_alone(tmp_path: Path) -> None:
    documents = compose(tmp_path, ["lookup-drafters", "model-init", "network-policies"])
    found = {(source, port) for source, target, port in reach(documents) if target == "the internet"}
    assert found == {(name, (443, "TCP")) for name in ("gateway", "verifier", "drafter-model")}


def test_production_reaches_its_own_redis_from_gateways_alone() -> None:
    documents = render(K8S / "overlays/production")
    places, store = pods(documents), Place("10.20.30.40")
    able = {name for name, place in places.items() if may_reach(documents, place, store, (6379, "TCP"))}
    assert able == {"gateway"}
