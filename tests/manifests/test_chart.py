"""The Helm chart's objects are kustomize's, with the same settings; what the schema does not know is refused."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import GatewayConfig
from tests.manifests.charts import ONE_POOL, comparable, helm, rendered, template, unordered
from tests.manifests.policies import POLICIES, drain_s, settings, there_is_time_to_drain
from tests.manifests.rendering import K8S, Documents, find, render, roles, workloads
from tests.manifests.test_schemas import VERSIONS, is_custom
from tests.manifests.test_settings import GIVEN, settled
from tools.chart import EXAMPLES, ONE_OF, OVERLAYS, SWITCHED, WAYS_IN


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
    """But for what the chart asks for, and sizes, which follow components."""
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    one_pool = yaml.safe_load(ONE_POOL.read_text())
    documents = render(K8S / "overlays" / "gpu")
    data = find(documents, "ConfigMap", "settings")["data"]
    given = values["settings"] | one_pool["settings"]
    assert given == {name: "" if name.endswith("_storage") else value for name, value in data.items()}
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


def composed(folder: Path, overlay: str, on: Sequence[str] = (), off: Sequence[str] = ()) -> Documents:
    """The overlay, without some components, with others on top; one takes the place of what it replaces in the list."""
    written = K8S / "overlays" / overlay
    text = (written / "kustomization.yaml").read_text()
    up = os.path.relpath(K8S, folder / "below")
    (folder / "below").mkdir()
    for file in written.glob("*.yaml"):
        shutil.copy(file, folder / "below")
    above = list(on)
    for component in on:
        (rivals,) = [group for group in ONE_OF if component in group] or [()]
        for rival in (each for each in rivals if each != component and f"components/{each}\n" in text):
            last = component == "store-elsewhere"
            line = f"  - ../../components/{rival}\n"
            text = text.replace(line, "" if last else line.replace(rival, component))
            above = above if last else [each for each in above if each != component]
    for component in off:
        text = text.replace(f"  - ../../components/{component}\n", "")
    (folder / "below" / "kustomization.yaml").write_text(text.replace("../../", f"{up}/"))
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", "namespace: slipstream"]
    lines += ["labels: [{pairs: {app.kubernetes.io/part-of: slipstream}, includeTemplates: true}]"]
    lines += ["resources: [below]", f"transformers: [{up[3:]}/settings]"]
    lines += [f"components: [{', '.join(f'{up[3:]}/components/{name}' for name in above)}]"]
    (folder / "kustomization.yaml").write_text("\n".join(lines))
    return render(folder)


def has(overlay: str, component: str) -> bool:
    return f"components/{component}\n" in (K8S / "overlays" / overlay / "kustomization.yaml").read_text()


@pytest.mark.parametrize(
    ("overlay", "components"),
    [
        *(("standalone", [name]) for name in SWITCHED if not has("standalone", name) and name != "public-certificate"),
        ("standalone", ["mtls", "public-certificate"]),
        ("standalone", ["model-cache", "multi-gpu-verifier", "openshift"]),
        ("standalone", ["pull-secret"]),
        ("gpu", ["pdb", "monitoring", "store-elsewhere"]),
        ("local", ["network-policies", "pdb", "priority", "spread", "api-keys", "model-init", "store-password"]),
        ("production", ["model-init", "store-password", "collector-elsewhere"]),
        ("production", ["client-certificate", "openshift"]),
        ("production", ["model-images", "public-certificate"]),
    ],
)
def test_a_component_that_is_switched_on_is_what_kustomize_makes_of_it(
    chart: Path, tmp_path: Path, overlay: str, components: list[str]
) -> None:
    if components == ["autoscaling"]:
        components = ["monitoring", *components]
    expected = composed(tmp_path, overlay, components)
    documents = template(chart, {"overlay": overlay, "components": dict.fromkeys(components, True)})
    assert unordered(documents) == unordered(render(tmp_path))
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []
    assert expected


def switched_off() -> list[Any]:
    """(overlay, components) that are left out: each alone in the long form, and several at a time in the short one, but
    for `store-elsewhere`, without which there is a store that other components change."""
    of = {name: "production" if has("production", name) else "standalone" for name in SWITCHED}
    names = [name for name in SWITCHED if has(of[name], name)]
    short = ("store-elsewhere",)
    alone = [pytest.param(of[name], [name], marks=() if name in short else pytest.mark.slow) for name in names]
    together = {
        overlay: [name for name in names if of[name] == overlay and name not in short]
        for overlay in ("production", "standalone")
    }
    # Every other one of a list, so that neighbours are left out without each other.
    several = [(overlay, named[first::2]) for overlay, named in together.items() for first in (0, 1)]
    return alone + [case for case in several if case[1]]


@pytest.mark.parametrize(("overlay", "components"), switched_off())
def test_components_that_are_switched_off_are_left_out(
    chart: Path, tmp_path: Path, overlay: str, components: list[str]
) -> None:
    monitoring = "monitoring" in components
    off = dict.fromkeys(components, False) | ({"autoscaling": False} if monitoring else {})
    documents = template(chart, {"overlay": overlay, "components": off})
    expected = composed(tmp_path, overlay, off=components)
    kept = [each for each in expected if not monitoring or each["kind"] != "ScaledObject"]
    assert unordered(documents) == unordered(kept)


def test_autoscaling_decides_how_many_replicas_there_are(chart: Path) -> None:
    documents = template(chart, {"components": {"autoscaling": True, "monitoring": True}})
    scaled = {each["metadata"]["name"] for each in documents if each["kind"] == "ScaledObject"}
    assert scaled == {"gateway", "verifier", "drafter-model"}
    assert not any("replicas" in find(documents, "Deployment", name)["spec"] for name in scaled)
    words = ["--values", ONE_POOL, "--set", "components.autoscaling=true,components.monitoring=true"]
    done = rendered(chart, {}, "slipstream", *words, "--set", "deployments.verifier.replicas=2")
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
    kinds = Counter(each["kind"] for each in yaml.safe_load_all((EXAMPLES / WAYS_IN["inference-pool"]).read_text()))
    ways = {"gpu": kinds, "local": Counter(InferencePool=1, HTTPRoute=1)}
    for overlay, added in ways.items():
        documents = template(chart, {"overlay": overlay, **pool}, "elsewhere")
        former = Counter(each["kind"] for each in render(K8S / "overlays" / overlay) if each["kind"] != "Namespace")
        assert Counter(each["kind"] for each in documents) - former == added
        assert {each["metadata"]["namespace"] for each in documents if each["kind"] in added} == {"elsewhere"}


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
    linted = helm("lint", "--strict", chart, "--values", ONE_POOL)
    assert linted.returncode == 0, linted.stdout
    assert helm("package", chart, "--destination", chart.parent).returncode == 0
    assert (chart.parent / "slipstream-0.1.0.tgz").stat().st_size < 1 << 20  # what a release's secret holds
