"""Dashboards, rules and the collectors' settings are written down once, in deploy/; manifests take them from there."""

from __future__ import annotations

import yaml

from tests.manifests.rendering import K8S, ROOT, environment, find, render, roles

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
