"""The Helm chart's objects are kustomize's, with the same settings; what the schema does not know is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import GatewayConfig
from tests.manifests.policies import POLICIES, drain_s, settings, there_is_time_to_drain
from tests.manifests.rendering import K8S, ROOT, Documents, find, render, roles, workloads
from tests.manifests.test_schemas import VERSIONS, is_custom
from tests.manifests.test_settings import GIVEN, settled
from tools.chart import ADDED, OVERLAYS, POOL


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", ROOT / "tools" / "helm", *words], capture_output=True, text=True, timeout=110)


def template(chart: Path, values: dict[str, Any], namespace: str = "slipstream") -> Documents:
    (chart.parent / "values.yaml").write_text(yaml.safe_dump(values))
    options = ["--namespace", namespace, "--kube-version", "1.32.0", "--values", chart.parent / "values.yaml"]
    done = helm("template", "slipstream", chart, *options)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def comparable(documents: Documents) -> dict[tuple[str, str], Any]:
    """By kind and name, without the namespace's own object and the hashes in names."""
    text = re.sub(r"\b(models|model-cache)-[0-9a-z]{10}\b", r"\1", json.dumps(documents))
    found = {(each["kind"], each["metadata"]["name"]): each for each in json.loads(text) if each["kind"] != "Namespace"}
    assert len(found) == sum(each["kind"] != "Namespace" for each in documents)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_charts_objects_are_those_of_the_overlay_and_valid(chart: Path, overlay: str) -> None:
    documents = template(chart, {"overlay": overlay})
    assert comparable(documents) == comparable(render(K8S / "overlays" / overlay))
    for document in documents:
        if not is_custom(document):
            kubernetes_validate.validate(document, VERSIONS[1], strict=True)


def test_every_overlay_is_in_the_chart() -> None:
    assert set(OVERLAYS) == {path.name for path in (K8S / "overlays").iterdir()}


def test_settings_and_namespace_do_what_they_do_in_kustomize(chart: Path, tmp_path: Path) -> None:
    documents = template(chart, {"overlay": "production", "settings": GIVEN}, "elsewhere")
    assert comparable(documents) == comparable(settled(tmp_path, "production", "priority-elsewhere"))


def test_releases_in_two_namespaces_share_no_object(chart: Path) -> None:
    names = [
        {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in template(chart, {}, namespace)}
        for namespace in ("one", "two")
    ]
    assert names[0] and not names[0] & names[1]


def test_defaults_of_the_chart_are_those_of_kustomize() -> None:
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    documents = render(K8S / "overlays" / "gpu")
    assert values["settings"] == find(documents, "ConfigMap", "settings")["data"]
    assert values["models"] == comparable(documents)["ConfigMap", "models"]["data"]


def test_a_deployment_is_changed_by_values(chart: Path) -> None:
    image = "registry.example/verifier@sha256:" + "a" * 64
    given = {
        "replicas": 3,
        "image": image,
        "env": {"VERIFIER_KV_TOKENS": "98304"},
        "resources": {"limits": {"cpu": "9"}},
    }
    documents = template(chart, {"deployments": {"verifier": given}})
    verifier = find(documents, "Deployment", "verifier")["spec"]
    (container,) = verifier["template"]["spec"]["containers"]
    assert (verifier["replicas"], container["image"]) == (3, image)
    assert [each["value"] for each in container["env"] if each["name"] == "VERIFIER_KV_TOKENS"] == ["98304"]
    assert container["resources"]["limits"] == {
        "cpu": "9",
        "memory": "96Gi",
        "ephemeral-storage": "2Gi",
        "nvidia.com/gpu": "1",
    }
    former = comparable(render(K8S / "overlays" / "standalone"))
    assert {key for key, each in comparable(documents).items() if each != former[key]} == {("Deployment", "verifier")}


def composed(folder: Path, overlay: str, *components: str) -> Documents:
    """The overlay with these components on top."""
    up = os.path.relpath(K8S, folder)
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", "namespace: slipstream"]
    lines += ["labels: [{pairs: {app.kubernetes.io/part-of: slipstream}, includeTemplates: true}]"]
    lines += [f"resources: [{up}/overlays/{overlay}]", f"transformers: [{up}/settings]"]
    lines += [f"components: [{', '.join(f'{up}/components/{name}' for name in components)}]"]
    (folder / "kustomization.yaml").write_text("\n".join(lines))
    return render(folder)


def unordered(documents: Documents) -> dict[tuple[str, str], Any]:
    """`comparable`, where the order of a container's environment does not count."""
    for workload in workloads(documents):
        for container in workload.containers:
            container.get("env", []).sort(key=lambda each: each["name"])
    return comparable(documents)


@pytest.mark.parametrize(
    ("overlay", "components"),
    [
        ("standalone", ["monitoring"]),
        ("gpu", ["pdb", "monitoring", "store-elsewhere"]),
        ("local", ["network-policies", "pdb"]),
        ("standalone", ["store-elsewhere"]),
        ("standalone", ["pull-secret"]),
    ],
)
def test_a_component_that_is_switched_on_is_what_kustomize_makes_of_it(
    chart: Path, tmp_path: Path, overlay: str, components: list[str]
) -> None:
    documents = template(chart, {"overlay": overlay, "components": dict.fromkeys(components, True)})
    assert unordered(documents) == unordered(composed(tmp_path, overlay, *components))
    assert [sentence for policy in POLICIES for sentence in policy(render(tmp_path))] == []


@pytest.mark.parametrize("component", [*ADDED])
def test_a_component_that_is_switched_off_is_left_out(chart: Path, tmp_path: Path, component: str) -> None:
    kustomization = (K8S / "overlays" / "production" / "kustomization.yaml").read_text()
    for file in ("gateway.yaml", "clients.yaml"):
        shutil.copy(K8S / "overlays" / "production" / file, tmp_path)
    text = kustomization.replace(f"  - ../../components/{component}\n", "")
    assert text != kustomization
    (tmp_path / "kustomization.yaml").write_text(text.replace("../../", f"{os.path.relpath(K8S, tmp_path)}/"))
    documents = template(chart, {"overlay": "production", "components": {component: False}})
    assert comparable(documents) == comparable(render(tmp_path))


def test_autoscaling_decides_how_many_replicas_there_are(chart: Path) -> None:
    documents = template(chart, {"components": {"autoscaling": True, "monitoring": True}})
    scaled = {each["metadata"]["name"] for each in documents if each["kind"] == "ScaledObject"}
    assert scaled == {"gateway", "verifier", "drafter-model"}
    assert not any("replicas" in find(documents, "Deployment", name)["spec"] for name in scaled)
    words = ["--set", "components.autoscaling=true", "--set", "deployments.verifier.replicas=2"]
    done = helm("template", "slipstream", chart, "--kube-version", "1.32.0", *words)
    assert done.returncode != 0 and "autoscaling decides it" in done.stderr


@pytest.mark.parametrize("kept", [["model"], ["ngram", "suffix"], []])
def test_drafters_are_switched_off_by_their_kind(chart: Path, kept: list[str]) -> None:
    given = {name: name in kept for name in ("model", "ngram", "suffix")}
    documents = template(chart, {"overlay": "production", "drafters": given})
    deployed = {name for kind, name in comparable(documents) if name.startswith("drafter-") and kind == "Deployment"}
    assert deployed == {f"drafter-{name}" for name in kept}
    assert {name for _, name in comparable(documents) if name.startswith("drafter-")} == deployed
    config = settings(next(each for each in roles(documents) if each.role == "gateway"), documents)
    assert isinstance(config, GatewayConfig) and [entry.name for entry in config.entries] == kept
    assert list(config.prices_of_drafters()) == [name for name in kept if name == "model"]


def test_an_inference_pool_comes_with_its_route_and_with_policies_only_where_there_are_some(chart: Path) -> None:
    pool = {"components": {"inference-pool": True}}
    kinds = Counter(each["kind"] for each in yaml.safe_load_all(POOL.read_text()))
    ways = {"gpu": kinds, "local": Counter(InferencePool=1, HTTPRoute=1)}
    for overlay, added in ways.items():
        documents = template(chart, {"overlay": overlay, **pool}, "elsewhere")
        former = Counter(each["kind"] for each in render(K8S / "overlays" / overlay) if each["kind"] != "Namespace")
        assert Counter(each["kind"] for each in documents) - former == added
        assert {each["metadata"]["namespace"] for each in documents if each["kind"] in added} == {"elsewhere"}


@pytest.mark.parametrize(
    "given",
    [
        "overlay=laptop",
        "components.monitor=true",
        "components.monitoring=yes-please",
        "components.store-elsewhere=false",
        "drafters.medusa=true",
        "setting.registry=x",
        "settings.regstry=x",
        "settings.proxy=proxy:3128",
        "models.target_revision=main",
        "deployments.verifier.replicas=many",
        "deployments.verfier.replicas=2",
        "deployments.verifier.affinity=x",
        "drain.balancers_s=0",
        "drain.clients_s=1",
    ],
)
def test_values_that_nothing_reads_are_refused(chart: Path, given: str) -> None:
    done = helm("template", "slipstream", chart, "--kube-version", "1.32.0", "--set", given)
    assert done.returncode != 0 and given.partition("=")[0].split(".")[0] in done.stderr


@pytest.mark.parametrize(
    ("given", "sleep_s", "grace_s"),
    [
        ({"drain": {"balancers_s": 40, "streams_s": 600}}, 40, 600.0),
        (
            {"drain": {"streams_s": 600}, "deployments": {"gateway": {"env": {"GATEWAY_STORE_GRACE_S": "60.5"}}}},
            5,
            600.0,
        ),
        (
            {"deployments": {name: {"env": {f"{name.upper()}_GRACE_S": "900"}} for name in ("gateway", "verifier")}},
            5,
            900.0,
        ),
        ({"drain": {"streams_s": 600}, "deployments": {"gateway": {"env": {"GATEWAY_GRACE_S": "30"}}}}, 5, 30.0),
    ],
)
def test_the_time_that_pods_have_to_end_follows_what_they_wait_for(
    chart: Path, given: dict[str, Any], sleep_s: int, grace_s: float
) -> None:
    documents = template(chart, {"overlay": "standalone", **given})
    assert list(there_is_time_to_drain(documents)) == []
    (gateway,) = (each for each in roles(documents) if each.role == "gateway")
    assert gateway.spec["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": sleep_s}}}
    assert settings(gateway, documents).grace_s == grace_s
    for workload in roles(documents):  # and not much longer
        former = find(render(K8S / "overlays/standalone"), workload.kind, workload.name)["spec"]["template"]["spec"]
        longest = max(former["terminationGracePeriodSeconds"], sleep_s + drain_s(workload, documents) + 10)
        assert workload.spec["terminationGracePeriodSeconds"] <= longest


def test_a_change_of_models_starts_pods_again(chart: Path) -> None:
    other = template(chart, {"models": {"target_revision": "b" * 40}})
    names = [
        {d["metadata"]["name"] for d in each if "models-" in d["metadata"]["name"]}
        for each in (other, template(chart, {}))
    ]
    assert len(names[0]) == len(names[1]) == 1 and names[0] != names[1]


def test_a_job_is_another_one_where_its_template_differs(chart: Path) -> None:
    """The API server refuses to replace the template of one that is there."""
    given: list[dict[str, Any]] = [{}, {"models": {"target_revision": "b" * 40}}, {"settings": {"proxy": "http://p:1"}}]
    names = [
        {each.name for each in workloads(template(chart, {"overlay": "production", **values})) if each.kind == "Job"}
        for values in given
    ]
    assert all(len(each) == 1 for each in names) and len(set.union(*names)) == len(given)


def test_the_chart_passes_the_linter_and_can_be_packed(chart: Path) -> None:
    linted = helm("lint", "--strict", chart)
    assert linted.returncode == 0, linted.stdout
    assert helm("package", chart, "--destination", chart.parent).returncode == 0
    assert (chart.parent / "slipstream-0.1.0.tgz").stat().st_size < 1 << 20  # what a release's secret holds
