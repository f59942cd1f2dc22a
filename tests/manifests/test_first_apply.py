"""The commands of docs/deployment.md, run by kubectl and helm against a stand-in for the API server: from an empty
cluster to all objects and the secrets that pods wait for; and where a definition is missing, to nothing at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.manifests.api_server import CUSTOM, NATIVE, Cluster, Key, Object, served
from tests.manifests.rendering import K8S, ROOT, Documents, containers, render, tool, workloads
from tests.manifests.test_deployment_document import TEXT, shown
from tools.chart import SHORT_LIVED

CLUSTERS = {"plain": [NATIVE], "operators": [NATIVE, CUSTOM]}
NAMESPACE = Key("", "Namespace", "slipstream")
STEPS = re.split(r"^(?=\d\. \*\*|\*\*With Helm)", TEXT[TEXT.index("## A cluster with GPUs") :], flags=re.MULTILINE)


def commands(title: str) -> str:
    """What the step's block says, without ways to pods, which need some."""
    (step,) = (each for each in STEPS if title in each.partition("**")[2].partition("**")[0])
    block = textwrap.dedent(re.findall(r"```sh\n(.*?)```", step, re.DOTALL)[0])
    return "\n".join(line for line in block.splitlines() if "port-forward" not in line)


def run(script: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """As somebody pastes it: a line that fails ends nothing but what `&&` ties to it."""
    words = ["sh", "-c", script]
    own = SHORT_LIVED | env | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(words, env=os.environ | own, cwd=folder, capture_output=True, text=True, timeout=60)


def keys(documents: Documents) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in documents}


def stored(cluster: Cluster) -> set[tuple[str, str]]:
    """But for secrets, which somebody else writes."""
    return {(key.kind, key.name) for key in cluster.objects if key.kind != "Secret"}


def wanted(documents: Documents) -> set[tuple[str, str]]:
    """Secrets, and keys in them, without which a pod does not start."""
    made = {each["spec"]["secretName"] for each in documents if each["kind"] == "Certificate"}
    found: set[tuple[str, str]] = set()
    for workload in workloads(documents):
        for volume in workload.spec.get("volumes", []):
            name = volume.get("secret", {}).get("secretName")
            if name and name not in made:
                found.add((name, "api-keys" if name == "gateway-keys" else ""))
        for container in workload.containers:
            references = [each.get("valueFrom", {}).get("secretKeyRef") for each in container.get("env", [])]
            found |= {(each["name"], each["key"]) for each in references if each and not each.get("optional")}
    return found


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Key, Object]:
    """What any cluster holds after the step that creates them, their namespace too."""
    tool("kubectl")
    folder, cluster = tmp_path_factory.mktemp("secrets"), Cluster(NATIVE)
    with served(cluster, folder) as env:
        done = run(commands("Create secrets"), env, folder)
    assert done.returncode == 0, done.stderr
    assert stored(cluster) == {(NAMESPACE.kind, NAMESPACE.name)} and len(cluster.objects) > 1
    return cluster.objects


def prepared(secrets: Mapping[Key, Object], *definitions: Mapping[str, Mapping[str, str]]) -> Cluster:
    """A cluster after that step."""
    cluster = Cluster(*definitions)
    cluster.objects.update(secrets)
    return cluster


@pytest.mark.parametrize(
    "overlay", ["standalone", "mine", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpu", "production"))]
)
def test_the_documents_commands_lead_to_all_objects_and_secrets(
    secrets: Mapping[Key, Object], tmp_path: Path, overlay: str
) -> None:
    folder = shown("mine", tmp_path) if overlay == "mine" else K8S / "overlays" / overlay
    documents = render(folder)
    cluster = prepared(secrets, *CLUSTERS["operators" if overlay in ("production", "mine") else "plain"])
    with served(cluster, tmp_path) as env:
        script = commands("Apply").replace("k8s/overlays/mine", str(folder))
        if "Job" not in {each["kind"] for each in documents}:  # as the document says of that line
            script = "\n".join(line for line in script.splitlines() if "with `model-cache`" not in line)
        done = run(script, env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert stored(cluster) == keys(documents)
    found = {(key.name, name) for key, each in cluster.objects.items() for name in each.get("data", {})}
    assert wanted(documents) and wanted(documents) <= found


def test_where_a_definition_is_missing_kubectl_applies_nothing(secrets: Mapping[Key, Object], tmp_path: Path) -> None:
    folder = shown("mine", tmp_path)
    for missing in CUSTOM:
        others = {version: kinds for version, kinds in CUSTOM.items() if version != missing}
        cluster = prepared(secrets, NATIVE, others)
        with served(cluster, tmp_path) as env:
            done = run(commands("Apply").replace("k8s/overlays/mine", str(folder)), env, tmp_path)
        assert done.returncode != 0 and missing in done.stderr
        assert stored(cluster) == {(NAMESPACE.kind, NAMESPACE.name)}


@pytest.mark.parametrize(("overlay", "definitions"), [("standalone", "plain"), ("production", "operators")])
def test_helm_installs_what_kustomize_would_apply(
    chart: Path, secrets: Mapping[Key, Object], tmp_path: Path, overlay: str, definitions: str
) -> None:
    cluster = prepared(secrets, *CLUSTERS[definitions])
    done = _install(chart, cluster, tmp_path, overlay)
    assert done.returncode == 0, done.stderr
    expected = keys(render(K8S / "overlays" / overlay))
    assert {_plain(key) for key in stored(cluster)} == {_plain(key) for key in expected}
    images = {container["image"] for _, container in containers(list(cluster.objects.values()))}
    assert not any(image.startswith("slipstream/") for image in images)
    assert re.search(r"port-forward deployment/gateway.*--trace.*slipstream trace ID", done.stdout, re.DOTALL)


def test_where_a_definition_is_missing_helm_installs_nothing(
    chart: Path, secrets: Mapping[Key, Object], tmp_path: Path
) -> None:
    cluster = prepared(secrets, NATIVE)
    done = _install(chart, cluster, tmp_path, "production")
    assert done.returncode != 0 and "no matches for kind" in done.stderr
    assert stored(cluster) == {(NAMESPACE.kind, NAMESPACE.name)}


def _install(chart: Path, cluster: Cluster, folder: Path, overlay: str) -> subprocess.CompletedProcess[str]:
    """By the document's command, from the folder that is packed and not from a registry."""
    (command,) = re.findall(r"^helm install .*?(?:\\\n.*?)*$", commands("With Helm"), re.MULTILINE)
    command = re.sub(r"oci://\S+", str(chart), command).replace("overlay=standalone", f"overlay={overlay}")
    with served(cluster, folder) as env:
        return run(f"sh {ROOT}/tools/{command}", env, folder)


def _plain(key: tuple[str, str]) -> tuple[str, str]:
    return key[0], re.sub(r"^(models|model-cache)-[0-9a-z]{10}$", r"\1", key[1])
