"""The overlay `local` with the shipped models and two of each role: accepted, ready, and not disturbed by rollouts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.api import wait
from tests.cluster.cluster import PATIENCE, ROLLOUT_S, Cluster, runs

NAMESPACE = "slipstream"
ROLES = ("drafter-model", "drafter-ngram", "drafter-suffix", "verifier", "gateway")
READY_S = 60.0
LOST_S = 30
"""The tolerations of the manifests."""
MODELS = "import httpx, sys; print(httpx.get(sys.argv[1]).raise_for_status().text)"


@pytest.fixture(scope="module")
def local(kubernetes: Cluster) -> Iterator[Cluster]:
    kubernetes.namespace(NAMESPACE)
    yield kubernetes
    kubernetes.away(NAMESPACE)


def test_the_overlay_is_accepted_and_ready_within_a_minute(local: Cluster) -> None:
    assert "Warning" not in local.kubectl("apply", "--server-side", "-k", "k8s/overlays/local")
    print(f"ready after {local.wait_available(NAMESPACE, READY_S):.0f} s")


def test_a_second_apply_changes_nothing(local: Cluster) -> None:
    local.kubectl("apply", "--server-side", "-k", "k8s/overlays/local")
    local.kubectl("diff", "--server-side", "-k", "k8s/overlays/local")


@pytest.mark.slow
def test_a_restart_of_each_role_disturbs_no_request_and_changes_no_text(local: Cluster) -> None:
    """In the shipped models' own arithmetic."""
    _have_two(local)
    with local.load(NAMESPACE) as seen:
        for name in ROLES:
            local.kubectl("-n", NAMESPACE, "rollout", "restart", f"deployment/{name}")
            local.wait_available(NAMESPACE, ROLLOUT_S)
    print(seen)
    assert seen["done"] > len(ROLES)
    assert (seen["errors"], seen["changed"]) == ({}, [])


@pytest.mark.slow
def test_verifiers_of_one_deployment_have_one_arithmetic(local: Cluster) -> None:
    """What decides numbers is chosen by what the machine is, so a restart changes no text."""
    _have_two(local)
    words = ("-c", MODELS, f"http://gateway.{NAMESPACE}:8000/v1/models")
    with local.client(NAMESPACE) as place:
        listed = json.loads(local.run(*place.inside(sys.executable, *words)))["data"]
    assert len(local.names(NAMESPACE, "verifier")) == 2
    assert [len(each["arithmetics"]) for each in listed if each["verifiers"]] == [1], listed


@pytest.mark.slow
def test_gateways_whose_store_is_wrong_replace_none_that_works(local: Cluster) -> None:
    _have_two(local)
    wrong = ("set", "env", "deployment/gateway", "GATEWAY_STORE=redis://nowhere:6379/0")
    local.replaces_no_gateway(
        NAMESPACE,
        lambda: local.kubectl("-n", NAMESPACE, *wrong),
        lambda: local.kubectl("-n", NAMESPACE, "rollout", "undo", "deployment/gateway"),
    )


@pytest.mark.slow
def test_pods_of_a_lost_node_are_replaced_after_half_a_minute(local: Cluster) -> None:
    nodes = {pod["spec"]["nodeName"] for pod in local.pods(NAMESPACE).values()}
    node = next(iter(nodes - {local.pods(NAMESPACE)["redis-0"]["spec"]["nodeName"]}))  # whose volume stays where it is
    there = {name for name, pod in local.pods(NAMESPACE).items() if pod["spec"]["nodeName"] == node}
    with local.load(NAMESPACE) as seen:
        local.kubelet.lose(node)
        seconds = wait(lambda: not there & local.names(NAMESPACE), f"{there} are given up", 2 * LOST_S * PATIENCE)
        local.wait_available(NAMESPACE, ROLLOUT_S)
    print(f"given up after {seconds:.0f} s", seen)
    assert seconds >= LOST_S - 2 and there
    assert seen["changed"] == []  # requests that began on what is lost may fail
    assert all(pod["spec"]["nodeName"] != node for pod in local.pods(NAMESPACE).values() if runs(pod))


def _have_two(local: Cluster) -> None:
    """Makes two gateways and two verifiers, since this overlay replaces one pod after the other."""
    for name in ("gateway", "verifier"):
        local.kubectl("-n", NAMESPACE, "scale", "deployment", name, "--replicas=2")
    local.wait_available(NAMESPACE, ROLLOUT_S)
