"""The overlay `standalone`, with keys and without TLS: accepted, ready, and a request's way through it in Jaeger."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from slipstream.client.gateway_endpoint import digest, new_key
from tests.cluster.api import wait
from tests.cluster.cluster import PATIENCE, ROLLOUT_S, Cluster, runs
from tests.cluster.images import ROOT
from tests.cluster.network import Interface

NAMESPACE = "team"
KEY = new_key()
READY_S = 60.0
DRAIN_S = 110.0
TRACE_S = 120.0
"""The collector decides a minute after a trace began."""
ACCESS = {"SLIPSTREAM_API_KEY": KEY, "SLIPSTREAM_PLAINTEXT_KEY": "true"}
HTTP = """
import httpx, os, sys
head = {"authorization": f"Bearer {os.environ['SLIPSTREAM_API_KEY']}", "traceparent": sys.argv[2]}
body = {"prompt": "import os", "max_tokens": 20}
url = f"http://gateway.{sys.argv[1]}:8000/v1/completions"
print(httpx.post(url, json=body, headers=head, timeout=60).raise_for_status().text)
"""
OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {namespace}
resources: [{up}/overlays/standalone]
transformers: [{up}/settings]
"""


@pytest.fixture(scope="module")
def standalone(kubernetes: Cluster) -> Iterator[Cluster]:
    """In another namespace than its own."""
    keys = {"api-keys": f'alice = {{ sha256 = "{digest(KEY).hex()}" }}\n'}
    kubernetes.namespace(NAMESPACE, redis={"password": secrets.token_hex(8)}, gateway_keys=keys)
    folder = kubernetes.folder / "overlay"
    folder.mkdir()
    up = os.path.relpath(ROOT / "k8s", folder)
    (folder / "kustomization.yaml").write_text(OVERLAY.format(namespace=NAMESPACE, up=up))
    yield kubernetes
    kubernetes.away(NAMESPACE)


def test_the_overlay_is_accepted_and_ready_within_a_minute(standalone: Cluster) -> None:
    assert "Warning" not in standalone.kubectl("apply", "--server-side", "-k", standalone.folder / "overlay")
    print(f"ready after {standalone.wait_available(NAMESPACE, READY_S):.0f} s")


def test_a_second_apply_changes_nothing(standalone: Cluster) -> None:
    standalone.kubectl("apply", "--server-side", "-k", standalone.folder / "overlay")
    standalone.kubectl("diff", "--server-side", "-k", standalone.folder / "overlay")


@pytest.mark.slow
def test_requests_by_grpc_and_http_are_answered_and_their_traces_are_in_jaeger(standalone: Cluster) -> None:
    """The key goes over the cluster's own network without TLS, which the client is told to accept."""
    gateway = f"dns:///gateway.{NAMESPACE}:50051"
    command = [sys.executable, "-m", "slipstream"]
    asked = [*command, "generate", "import os", "--max-tokens", "20", "--trace", "--server", gateway]
    jaeger = ["--jaeger", f"http://jaeger.{NAMESPACE}:16686", "--json"]
    env = {**standalone.environment, "SLIPSTREAM_API_KEY": KEY}
    allowed = {**env, **ACCESS}
    with standalone.client(NAMESPACE) as place:
        refused = _run(place, env, *asked)
        assert refused.returncode != 0 and "--plaintext-key" in refused.stderr
        done = _run(place, allowed, *asked)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        by_grpc = re.findall(r"\b[0-9a-f]{32}\b", done.stdout + done.stderr)[0]
        by_http = secrets.token_hex(16)
        answer = _run(place, env, sys.executable, "-c", HTTP, NAMESPACE, f"00-{by_http}-{secrets.token_hex(8)}-01")
        assert answer.returncode == 0 and json.loads(answer.stdout)["choices"][0]["text"], answer.stderr
        for trace in (by_grpc, by_http):
            shown = [*command, "trace", trace, *jaeger]
            wait(lambda shown=shown: not _run(place, env, *shown).returncode, "the trace is there", TRACE_S * PATIENCE)
            names = {span["name"].split()[0] for span in json.loads(_run(place, env, *shown).stdout)["spans"]}
            assert {"session", "round", "verify", "draft"} & names, names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secret", "wrong"), [("redis", {"password": "another"}), ("gateway-keys", {"api-keys": "alice = {"})]
)
def test_gateways_with_a_wrong_secret_replace_none_that_works(
    standalone: Cluster, secret: str, wrong: Mapping[str, str]
) -> None:
    right = standalone.objects(NAMESPACE, "secrets", "v1")[secret]["data"]

    def spoil() -> None:
        _put(standalone, secret, stringData=wrong)
        standalone.kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/gateway")

    def mend() -> None:
        _put(standalone, secret, data=right)
        standalone.kubectl("-n", NAMESPACE, "rollout", "undo", "deployment/gateway")

    standalone.replaces_no_gateway(NAMESPACE, spoil, mend, **ACCESS)


@pytest.mark.slow
def test_nodes_that_are_drained_disturb_no_request_and_change_no_text(standalone: Cluster) -> None:
    """The store's among them: while its pod moves, requests wait."""
    standalone.wait_available(NAMESPACE, ROLLOUT_S)
    nodes = sorted({pod["spec"]["nodeName"] for pod in standalone.pods(NAMESPACE).values()})
    store = standalone.pods(NAMESPACE)["redis-0"]["spec"]["nodeName"]
    with standalone.load(NAMESPACE, **ACCESS) as seen:
        for node in nodes:
            standalone.kubectl("drain", node, "--delete-emptydir-data", f"--timeout={DRAIN_S:.0f}s")
            standalone.wait_available(NAMESPACE, ROLLOUT_S)
            assert not any(pod["spec"]["nodeName"] == node for pod in standalone.pods(NAMESPACE).values() if runs(pod))
            standalone.kubectl("uncordon", node)
    print(nodes, seen)
    assert len(nodes) > 1 and store in nodes
    assert seen["done"] and (seen["errors"], seen["changed"]) == ({}, [])


def _put(cluster: Cluster, secret: str, **data: Mapping[str, str]) -> None:
    meta = {"name": secret, "namespace": NAMESPACE}
    cluster.kubectl(
        "replace", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": meta, **data})
    )


def _run(place: Interface, env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        place.inside(*words), env=env, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
