"""Dashboards, rules and the collectors' settings are written down once, in deploy/; manifests take them from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests.rendering import K8S, ROOT, Documents, amount, environment, find, render, roles
from tests.support.prometheus import promtool

DEPLOY = ROOT / "deploy"
PRODUCTION = K8S / "overlays/production"


def test_the_rules_of_the_operator_are_those_of_prometheus() -> None:
    groups = [
        group
        for name in ("recording", "alerts")
        for group in yaml.safe_load((DEPLOY / "prometheus" / f"{name}.yaml").read_text())["groups"]
    ]
    assert find(render(PRODUCTION), "PrometheusRule", "slipstream")["spec"]["groups"] == groups, "run tools/rules"


def test_every_dashboard_is_in_the_cluster() -> None:
    found = find(render(PRODUCTION), "ConfigMap", "grafana-dashboards")
    assert found["data"] == {path.name: path.read_text() for path in (DEPLOY / "grafana").glob("*.json")}


def test_collector_and_jaeger_read_their_files_and_listen_where_they_are_asked() -> None:
    documents = render(PRODUCTION)
    for name, folder in (("otel-collector", "otel"), ("jaeger", "jaeger")):
        pod = find(documents, "Deployment", name)["spec"]["template"]["spec"]
        mount = next(mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "config")
        (source,) = (volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "config")
        (file,) = find(documents, "ConfigMap", source)["data"]
        assert pod["containers"][0]["args"] == [f"--config={mount}/{file}"]
        assert (DEPLOY / folder / file).read_text() == find(documents, "ConfigMap", source)["data"][file]
        grpc = yaml.safe_load((DEPLOY / folder / file).read_text())["receivers"]["otlp"]["protocols"]["grpc"]
        assert grpc["endpoint"] == "0.0.0.0:4317"
    for workload in roles(documents):
        values = environment(workload.spec["containers"][0], documents)
        assert values["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://otel-collector:4317"


@pytest.mark.parametrize("overlay", ["production"])
def test_every_span_of_a_pod_names_its_pod(overlay: str) -> None:
    documents = render(K8S / "overlays" / overlay)
    for workload in roles(documents):
        container = workload.spec["containers"][0]
        fields = {
            each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
            for each in container["env"]
            if "fieldRef" in each.get("valueFrom", {})
        }
        names = [each["name"] for each in container["env"]]
        assert all(names.index(name) < names.index("OTEL_RESOURCE_ATTRIBUTES") for name in fields if "OTEL" in name)
        [given] = [each["value"] for each in container["env"] if each["name"] == "OTEL_RESOURCE_ATTRIBUTES"]
        told = dict(pair.split("=") for pair in given.strip().split(","))
        assert {key: fields.get(value[2:-1], value) for key, value in told.items()} == {
            "service.instance.id": "metadata.uid",
            "service.namespace": "metadata.namespace",
            "k8s.pod.name": "metadata.name",
            "k8s.pod.uid": "metadata.uid",
            "k8s.namespace.name": "metadata.namespace",
            "k8s.node.name": "spec.nodeName",
            "k8s.container.name": container["name"],
        }


SPAN_BYTES = 2048
"""Assumed, as are the next three."""
SESSIONS, STEPS_A_S, SPANS_OF_A_REQUEST = 32, 50, 500
"""Of a busy verifier."""
SPANS_OF_A_ROUND = {"notable": 0.2, "all": 4.0}
"""By SLIPSTREAM_TRACE_ROUNDS: 100 spans in 500 rounds; verify, round, commit and draft."""


@pytest.mark.parametrize("rounds", ["notable", "all"])
def test_the_collector_holds_what_production_sends(rounds: str) -> None:
    """Of the sampled share with all rounds; and of every request, since clients may ask, with notable ones."""
    documents = render(PRODUCTION)
    (gateway,) = (workload for workload in roles(documents) if workload.role == "gateway")
    values = environment(gateway.spec["containers"][0], documents)
    assert values["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio" and "SLIPSTREAM_TRACE_ROUNDS" not in values
    share = 1.0 if rounds == "notable" else float(values["OTEL_TRACES_SAMPLER_ARG"])
    verifiers = find(documents, "ScaledObject", "verifier")["spec"]["maxReplicaCount"]
    collector = yaml.safe_load((DEPLOY / "otel/collector.yaml").read_text())["processors"]
    tail, room = collector["tail_sampling"], collector["memory_limiter"]["limit_percentage"] / 100
    held_s = float(tail["decision_wait"].removesuffix("s"))
    spans = 1 + SPANS_OF_A_ROUND[rounds] * SESSIONS  # of a step, itself one
    assert 2 * spans * STEPS_A_S * share * verifiers * held_s * SPAN_BYTES < room * memory(documents, "otel-collector")
    steps = STEPS_A_S * (1 - (1 - share) ** SESSIONS) * verifiers
    assert 2 * steps * held_s < tail["num_traces"]


SENT_BYTES, STORED_BYTES = 450, 2400
"""Sizes of a span in OTLP and in Jaeger's store with its index, measured with 300 of docs/trace/request.jsonl."""
LARGEST = 4 * SPANS_OF_A_REQUEST * SPANS_OF_A_ROUND["all"]
"""Spans of a request of 2,000 rounds, each with spans of its own."""


def test_jaegers_disk_holds_what_the_collector_keeps_in_the_worst_hour() -> None:
    """Every request fails, is late and long, and was asked for."""
    documents = render(PRODUCTION)
    tail = yaml.safe_load((DEPLOY / "otel/collector.yaml").read_text())["processors"]["tail_sampling"]
    by_policy = {policy["name"]: policy.get("and", {}).get("and_sub_policy", []) for policy in tail["policies"]}
    rates = {
        name: each["bytes_limiting"]
        for name, policies in by_policy.items()
        for each in policies
        if each["type"] == "bytes_limiting"
    }
    assert set(rates) == {"errors", "late", "long", "asked-for"}
    assert all(rate["burst_capacity"] > 2 * LARGEST * SENT_BYTES for rate in rates.values()), "one trace fits"
    sent = sum(rate["bytes_per_second"] for rate in rates.values())
    jaeger = yaml.safe_load((DEPLOY / "jaeger/jaeger.yaml").read_text())
    [store] = jaeger["extensions"]["jaeger_storage"]["backends"].values()
    kept = re.fullmatch(r"\$\{env:JAEGER_KEEP:-(\d+)h\}", store["badger"]["ttl"]["spans"])
    assert kept is not None
    pod = find(documents, "Deployment", "jaeger")["spec"]["template"]["spec"]
    folder = environment(pod["containers"][0], documents)["JAEGER_FOLDER"]
    [volume] = (mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == folder)
    [room] = (amount(each["emptyDir"]["sizeLimit"]) for each in pod["volumes"] if each["name"] == volume)
    assert sent / SENT_BYTES * STORED_BYTES * 3600 * int(kept[1]) < 0.8 * room


def memory(documents: Documents, deployment: str) -> float:
    """Its limit in bytes."""
    containers = find(documents, "Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    return amount(containers[0]["resources"]["limits"]["memory"])


@pytest.mark.parametrize("scaled", ["verifier", "drafter-model"])
def test_waiting_sessions_count_for_scaling_while_no_replica_of_the_role_is_scraped(
    scaled: str, tmp_path: Path
) -> None:
    """That is when they wait. Without gateways nothing is known, and KEDA falls back."""
    triggers = find(render(PRODUCTION), "ScaledObject", scaled)["spec"]["triggers"]
    (query,) = (
        t["metadata"]["query"] for t in triggers if "slipstream_gateway_waiting_sessions" in t["metadata"]["query"]
    )
    there = "sessions" if scaled == "verifier" else "waiting_sessions"
    told = {
        'slipstream_gateway_waiting_sessions{namespace="slipstream"}': 7,
        f'slipstream_verifier_{there}{{namespace="slipstream"}}': 20,
    }

    def case(series: dict[str, int], expected: list[dict[str, Any]]) -> dict[str, Any]:
        given = [{"series": name, "values": f"{value}x5"} for name, value in series.items()]
        asked = [{"expr": query, "eval_time": "1m", "exp_samples": expected}]
        return {"interval": "1m", "input_series": given, "promql_expr_test": asked}

    (gateways, verifiers) = ({name: value} for name, value in told.items())
    cases = [case(told, [{"value": 27}]), case(gateways, [{"value": 7}]), case(verifiers, [])]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"tests": cases}))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "queries.yaml"))
