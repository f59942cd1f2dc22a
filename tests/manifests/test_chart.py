"""The Helm chart's objects are kustomize's, with the same settings; what the schema does not know is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.manifests.rendering import K8S, ROOT, Documents, find, render, tool
from tests.manifests.test_schemas import VERSIONS, is_custom
from tests.manifests.test_settings import GIVEN, settled
from tools.chart import OVERLAYS, write


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tool("kubectl")
    tool("npm")
    folder = tmp_path_factory.mktemp("chart") / "slipstream"
    write(folder)
    return folder


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", ROOT / "tools" / "helm", *words], capture_output=True, text=True, timeout=110)


def template(chart: Path, values: dict[str, Any], namespace: str = "slipstream") -> Documents:
    (chart.parent / "values.yaml").write_text(yaml.safe_dump(values))
    options = ["--namespace", namespace, "--kube-version", "1.32.0", "--values", chart.parent / "values.yaml"]
    done = helm("template", "slipstream", chart, *options)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def comparable(documents: Documents) -> dict[tuple[str, str], Any]:
    """By kind and name, without the namespace's own object and the hash in the name of ConfigMap `models`."""
    text = re.sub(r"\bmodels-[0-9a-z]{10}\b", "models", json.dumps(documents))
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
    assert comparable(documents) == comparable(settled(tmp_path, "production"))


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


@pytest.mark.parametrize(
    "given",
    [
        "overlay=laptop",
        "setting.registry=x",
        "settings.regstry=x",
        "settings.proxy=proxy:3128",
        "models.target_revision=main",
        "deployments.verifier.replicas=many",
        "deployments.verfier.replicas=2",
        "deployments.verifier.affinity=x",
    ],
)
def test_values_that_nothing_reads_are_refused(chart: Path, given: str) -> None:
    done = helm("template", "slipstream", chart, "--kube-version", "1.32.0", "--set", given)
    assert done.returncode != 0 and given.partition("=")[0].split(".")[0] in done.stderr


def test_a_change_of_models_starts_pods_again(chart: Path) -> None:
    other = template(chart, {"models": {"target_revision": "b" * 40}})
    names = [
        {d["metadata"]["name"] for d in each if "models-" in d["metadata"]["name"]}
        for each in (other, template(chart, {}))
    ]
    assert len(names[0]) == len(names[1]) == 1 and names[0] != names[1]


def test_the_chart_passes_the_linter_and_can_be_packed(chart: Path) -> None:
    linted = helm("lint", "--strict", chart)
    assert linted.returncode == 0, linted.stdout
    assert helm("package", chart, "--destination", chart.parent).returncode == 0
    assert (chart.parent / "slipstream-0.1.0.tgz").stat().st_size < 1 << 20  # what a release's secret holds
