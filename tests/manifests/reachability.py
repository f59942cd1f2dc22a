"""Who may reach whom by NetworkPolicies, as Kubernetes says. Whom policies select for a direction may do there what any
of them allows, all others may do everything; a connection needs both ends."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.manifests.rendering import Document, Documents, workloads

Port = tuple[int, str]
Direction = Literal["ingress", "egress"]
NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Place:
    """A pod, or an address outside the cluster, which has no namespace."""

    address: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


def pods(documents: Documents) -> dict[str, Place]:
    """Of everything rendered, by the name of what runs them, without a hash."""
    return {
        re.sub("-[0-9a-z]{10}$", "", workload.name): Place(f"10.244.0.{number}", "slipstream", workload.labels)
        for number, workload in enumerate(workloads(documents), 1)
    }


def may_reach(documents: Documents, source: Place, target: Place, port: Port) -> bool:
    policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
    return _allowed(policies, source, "egress", target, port) and _allowed(policies, target, "ingress", source, port)


def _allowed(policies: Iterable[Document], place: Place, direction: Direction, other: Place, port: Port) -> bool:
    specs = [p["spec"] for p in policies if p["metadata"]["namespace"] == place.namespace]
    mine = [s for s in specs if _selects(s["podSelector"], place.labels) and direction.title() in s["policyTypes"]]
    rules = [rule for spec in mine for rule in spec.get(direction, [])]
    return not mine or any(_rule(rule, direction, place, other, port) for rule in rules)


def _rule(rule: Document, direction: Direction, place: Place, other: Place, port: Port) -> bool:
    peers, ports = rule.get("from" if direction == "ingress" else "to"), rule.get("ports")
    known = not ports or any((each["port"], each.get("protocol", "TCP")) == port for each in ports)
    return known and (not peers or any(_peer(peer, place, other) for peer in peers))


def _peer(peer: Document, place: Place, other: Place) -> bool:
    if "ipBlock" in peer:  # of pods too: plugins differ, and this is the wider reading
        block, address = peer["ipBlock"], ipaddress.ip_address(other.address)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(out) for out in block.get("except", [])
        )
    if not other.namespace or not _selects(peer.get("podSelector", {}), other.labels):
        return False
    if "namespaceSelector" in peer:
        return _selects(peer["namespaceSelector"], {NAME: other.namespace})
    return other.namespace == place.namespace


def _selects(selector: Document, labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(_expression(each, labels) for each in selector.get("matchExpressions", []))


def _expression(expression: Document, labels: Mapping[str, str]) -> bool:
    key, operator = expression["key"], expression["operator"]
    if operator == "In":
        return labels.get(key) in expression["values"]
    if operator == "NotIn":
        return labels.get(key) not in expression["values"]
    return (key in labels) is (operator == "Exists")
