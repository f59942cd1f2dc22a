"""What differs between clusters is named once, in ConfigMap `settings`, and arrives wherever it is used."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.manifests.policies import POLICIES
from tests.manifests.rendering import K8S, Documents, containers, find, render, roles, workloads

GIVEN = {
    "registry": "registry.example:5000/team/x",
    "prometheus": "http://prometheus.observed:9090",
    "monitoring_namespace": "observed",
    "docs_url": "https://git.example/slipstream/",
    "pool_label": "cloud.google.com/gke-nodepool",
    "verifier_pool": "h100",
    "drafter_pool": "l4",
    "shared_class": "efs",
    "target_storage": "81Gi",
    "draft_storage": "21Gi",
    "shared_storage": "101Gi",
    "serving_class": "high",
    "drafting_class": "low.drafting",
    "hub": "https://mirror.example",
    "proxy": "http://proxy.example:3128",
    "egress_cidr": "10.2.0.0/16",
    "store_cidr": "10.3.0.0/16",
    "client_name": "llm.example",
    "issuer": "corp",
    "issuer_kind": "Issuer",
    "collector": "http://collector.observed:4317",
    "collector_cidr": "10.1.0.0/16",
    "collector_namespace": "watched",
}
HEAD = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: elsewhere\n"


def settled(folder: Path, overlay: str, components: str = "", layers: int = 1) -> Documents:
    """The overlay as somebody's own makes it, whose settings are all others; with further layers on top."""
    for layer in range(layers):
        made = folder / str(layer)
        made.mkdir()
        up = os.path.relpath(K8S, made)
        below = f"../{layer - 1}" if layer else f"{up}/overlays/{overlay}"
        lines = [f"resources: [{below}]", f"transformers: [{up}/settings]"]
        if not layer:
            lines += [f"configMapGenerator: [{{name: settings, behavior: merge, literals: {_literals()}}}]"]
            lines += [f"components: [{', '.join(f'{up}/components/{name}' for name in components.split())}]"]
        (made / "kustomization.yaml").write_text(HEAD + "\n".join(lines))
    return render(folder / str(layers - 1))


def _literals() -> str:
    return json.dumps([f"{name}={value}" for name, value in GIVEN.items()])


def defaults() -> dict[str, str]:
    data: dict[str, str] = find(render(K8S / "base"), "ConfigMap", "settings")["data"]
    return data


def test_every_setting_of_the_base_is_tried_here() -> None:
    assert set(defaults()) == set(GIVEN)


@pytest.mark.parametrize("layers", [1, 2])
def test_settings_and_namespace_arrive_everywhere(tmp_path: Path, layers: int) -> None:
    documents = settled(tmp_path, "production", "priority-elsewhere public-certificate", layers=layers)
    ours = {
        image
        for _, container in containers(documents)
        if "/gateway" in (image := container["image"]) or "cuda" in image
    }
    assert {re.sub(r":[\w.-]+$", "", image) for image in ours} == {
        f"{GIVEN['registry']}/{role}" for role in ("gateway", "verifier", "drafter")
    }
    others = [d for d in documents if d["metadata"]["name"] not in ("settings", "grafana-dashboards")]
    rest = json.dumps(others)
    without_jaeger = json.dumps([d for d in others if d["metadata"]["name"] != "jaeger"])
    for name, default in defaults().items():
        if default and name not in ("registry", "verifier_pool", "drafter_pool", "client_name", "store_cidr"):
            # Jaeger's disk happens to be as large as a drafter's.
            assert f'"{default}"' not in (without_jaeger if name == "draft_storage" else rest), name
    own = {"target_storage", "draft_storage"}  # of pods that have volumes of their own
    for name, value in GIVEN.items():
        assert name in own or value in rest, name
    queries = [t["metadata"]["query"] for d in documents if d["kind"] == "ScaledObject" for t in d["spec"]["triggers"]]
    assert len(queries) == 6 and {ns for q in queries for ns in re.findall(r'namespace="(\w+)"', q)} == {"elsewhere"}
    assert {d["metadata"].get("namespace", "elsewhere") for d in documents} == {"elsewhere"}
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []


@pytest.mark.parametrize("layers", [1, 2])
def test_pods_that_fetch_models_have_volumes_of_the_settings_sizes(tmp_path: Path, layers: int) -> None:
    groups = "multi-node-verifier" if layers == 1 else ""
    documents = settled(tmp_path, "standalone", groups, layers=layers)
    sizes = {}
    for workload in workloads(documents):
        for volume in workload.spec.get("volumes", []):
            if "ephemeral" in volume:
                claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
                sizes[workload.name] = claim["resources"]["requests"]["storage"]
    verifiers = ["verifier-group leader", "verifier-group worker"] if groups else ["verifier"]
    assert sizes == dict.fromkeys(verifiers, GIVEN["target_storage"]) | {"drafter-model": GIVEN["draft_storage"]}


def test_a_target_for_several_gpus_has_room_for_its_weights(tmp_path: Path) -> None:
    up = os.path.relpath(K8S, tmp_path)
    lines = [f"resources: [{up}/overlays/standalone]", f"components: [{up}/components/multi-gpu-verifier]"]
    (tmp_path / "kustomization.yaml").write_text(HEAD + "\n".join([*lines, f"transformers: [{up}/settings]"]))
    volumes = find(render(tmp_path), "Deployment", "verifier")["spec"]["template"]["spec"]["volumes"]
    (claim,) = (each["ephemeral"]["volumeClaimTemplate"]["spec"] for each in volumes if each["name"] == "models")
    assert claim["resources"]["requests"]["storage"] == "300Gi"
    (caches,) = (each["emptyDir"] for each in volumes if each["name"] == "caches")
    assert caches == {"sizeLimit": "20Gi"}


@pytest.mark.parametrize("layers", [1, 2])
def test_the_certificate_for_clients_names_the_namespace_and_one_of_a_public_issuer_does_not(
    tmp_path: Path, layers: int
) -> None:
    names = {}
    for components in ("", "public-certificate"):
        (tmp_path / f"with {components}").mkdir()
        documents = settled(tmp_path / f"with {components}", "production", components, layers)
        names[components] = find(documents, "Certificate", "gateway-clients")["spec"]["dnsNames"]
    inside = ["gateway", "gateway.elsewhere.svc", "gateway.elsewhere.svc.cluster.local"]
    assert names == {"": inside, "public-certificate": [GIVEN["client_name"]]}


CLASSES = {"gateway": "serving", "verifier": "serving", "drafter": "drafting", "store": "serving"}


def classes(documents: Documents) -> dict[str, set[str | None]]:
    """Of pods, by their component."""
    found: dict[str, set[str | None]] = {component: set() for component in CLASSES}
    for workload in workloads(documents):
        component = workload.labels["app.kubernetes.io/component"].removesuffix("-follower")
        if component in found:
            found[component].add(workload.spec.get("priorityClassName"))
    return found


@pytest.mark.parametrize("layers", [1, 2])
def test_two_namespaces_have_priority_classes_of_their_own(tmp_path: Path, layers: int) -> None:
    """They belong to the cluster: of one name, only one of two installations could own them."""
    documents = settled(tmp_path, "standalone", "multi-gpu-verifier multi-node-verifier", layers)
    made = {d["metadata"]["name"] for d in documents if d["kind"] == "PriorityClass"}
    assert made == {f"slipstream-{which}.elsewhere" for which in CLASSES.values()}
    assert classes(documents) == {name: {f"slipstream-{which}.elsewhere"} for name, which in CLASSES.items()}
    scoped = {d["kind"] for d in documents if "namespace" not in d["metadata"]}
    assert scoped == {"Namespace", "PriorityClass"}  # nothing else that two installations could share


@pytest.mark.parametrize("overlay", ["local", "standalone"])
def test_classes_that_are_there_already_replace_those_of_the_installation(tmp_path: Path, overlay: str) -> None:
    documents = settled(tmp_path, overlay, "priority-elsewhere", layers=2)
    assert not any(d["kind"] == "PriorityClass" for d in documents)
    assert classes(documents) == {name: {GIVEN[f"{which}_class"]} for name, which in CLASSES.items()}


def test_roles_are_scheduled_by_pools_that_two_settings_name(tmp_path: Path) -> None:
    documents = settled(tmp_path, "standalone")
    for name, pool in (("verifier", "h100"), ("drafter-model", "l4")):
        spec = find(documents, "Deployment", name)["spec"]["template"]["spec"]
        (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert term["matchExpressions"] == [{"key": GIVEN["pool_label"], "operator": "In", "values": [pool]}]
        assert "nodeSelector" not in spec


@pytest.mark.parametrize("overlay", ["gpu", "production"])  # fetched by each pod, and to a shared volume
def test_groups_of_several_nodes_take_settings_and_models_as_a_deployment_does(tmp_path: Path, overlay: str) -> None:
    documents = settled(tmp_path, overlay, "multi-gpu-verifier multi-node-verifier")
    group = find(documents, "LeaderWorkerSet", "verifier-group")
    (models,) = (d["metadata"]["name"] for d in documents if d["metadata"]["name"].startswith("models-"))
    for each in ("leaderTemplate", "workerTemplate"):
        spec = group["spec"]["leaderWorkerTemplate"][each]["spec"]
        assert spec["containers"][0]["image"] == f"{GIVEN['registry']}/verifier-vllm:0.1.0"
        assert '"key": "cloud.google.com/gke-nodepool", "operator": "In", "values": ["h100"]' in json.dumps(spec)
        assert set(re.findall(r'"configMapKeyRef": {[^}]*"name": "([\w-]+)"', json.dumps(spec))) == {models}
        for fetch in spec.get("initContainers", []):
            values = {entry["name"]: entry.get("value") for entry in fetch["env"]}
            assert (values["HF_ENDPOINT"], values["HTTPS_PROXY"]) == (GIVEN["hub"], GIVEN["proxy"])
            assert fetch["image"] == f"{GIVEN['registry']}/gateway:0.1.0"
        assert len(spec.get("initContainers", [])) == {"gpu": 1, "production": 0}[overlay]


def test_models_are_of_a_revision_wherever_they_are_named(tmp_path: Path) -> None:
    """By fetchers and by every role that reads one."""
    for overlay in ("gpu", "production"):
        documents = render(K8S / "overlays" / overlay)
        (models,) = (d["data"] for d in documents if d["metadata"]["name"].startswith("models-"))
        assert all(re.fullmatch("[0-9a-f]{40}", models[f"{which}_revision"]) for which in ("target", "draft"))
        fetchers = [c for _, c in containers(documents) if c.get("command", [""])[0] == "hf"]
        assert len(fetchers) == {"gpu": 3, "production": 2}[overlay]
        assert all(c["command"][2:5] == ["$(MODEL)", "--revision", "$(MODEL_REVISION)"] for c in fetchers)
        readers = [w for w in roles(documents) if any(v["name"] == "models" for v in w.spec["volumes"])]
        values = [entry.get("value") for w in readers for entry in w.spec["containers"][0]["env"]]
        assert len(readers) == values.count("$(MODEL)@$(MODEL_REVISION)") == 3


def job(documents: Documents) -> tuple[str, str]:
    """The name of the job that fills the cache, and its template."""
    (found,) = (d for d in documents if d["kind"] == "Job")
    return found["metadata"]["name"], json.dumps(found["spec"], sort_keys=True)


@pytest.mark.parametrize(
    "change",
    [
        "configMapGenerator: [{name: models, behavior: merge, literals: [draft=other]}]",
        "configMapGenerator: [{name: models, behavior: merge, literals: [target_revision=other]}]",
        "configMapGenerator: [{name: settings, behavior: merge, literals: [hub=other]}]",
        "configMapGenerator: [{name: settings, behavior: merge, literals: [proxy=other]}]",
        "configMapGenerator: [{name: settings, behavior: merge, literals: [registry=other]}]",
        "images: [{name: slipstream/gateway, newTag: other}]",
    ],
)
def test_a_job_is_another_one_where_its_template_differs(tmp_path: Path, change: str) -> None:
    """The API server refuses to replace the template of one that is there."""
    up = os.path.relpath(K8S, tmp_path / "own")
    for folder, below, text in (("own", f"{up}/overlays/production", change), ("top", "../own", "")):
        (tmp_path / folder).mkdir()
        lines = [f"resources: [{below}]", f"transformers: [{up}/settings]", text]
        (tmp_path / folder / "kustomization.yaml").write_text(HEAD + "\n".join(lines))
    (name, spec), (plain, former) = (job(render(path)) for path in (tmp_path / "top", K8S / "overlays/production"))
    assert spec != former and name != plain
    assert re.fullmatch("model-cache-[0-9a-z]{10}", name)


def test_a_collector_elsewhere_replaces_ours(tmp_path: Path) -> None:
    documents = settled(tmp_path, "gpu", "collector-elsewhere")
    left = [d for d in documents if d["metadata"]["name"].startswith(("otel-collector", "jaeger"))]
    assert {d["kind"] for d in left} == {"NetworkPolicy"}
    assert json.dumps(documents).count(GIVEN["collector"]) == 1 + 5  # the settings, and five Deployments of ours


def test_openshift_chooses_the_user_of_every_pod(tmp_path: Path) -> None:
    documents = settled(tmp_path, "production", "openshift")
    assert not re.search("runAsUser|runAsGroup|fsGroup", json.dumps(documents))
    assert json.dumps(documents).count('"runAsNonRoot": true') == 8


def test_only_production_needs_custom_resources(tmp_path: Path) -> None:
    """So elsewhere nothing is half applied where a definition is missing."""
    core = r"(apps/|batch/|policy/|networking.k8s.io/|scheduling.k8s.io/)?v1"
    custom = {
        path.name: {d["apiVersion"] for d in render(path) if not re.fullmatch(core, d["apiVersion"])}
        for path in (K8S / "overlays").iterdir()
    }
    assert {name for name, found in custom.items() if found} == {"production"}


def test_stores_have_passwords_and_pods_policies_everywhere_but_on_a_laptop() -> None:
    for path in (K8S / "overlays").iterdir():
        documents = render(path)
        policed = any(d["metadata"]["name"] == "default-deny" for d in documents)
        stores = [d for d in documents if d["kind"] == "StatefulSet"]
        args = [d["spec"]["template"]["spec"]["containers"][0]["args"] for d in stores]
        secured = all("--requirepass" in given for given in args)
        assert (policed, secured) == ((False, False) if path.name == "local" else (True, True)), path.name


def test_every_pod_pulls_with_the_secret_of_the_registry(tmp_path: Path) -> None:
    documents = settled(tmp_path, "production", "pull-secret")
    accounts = {d["metadata"]["name"]: d.get("imagePullSecrets") for d in documents if d["kind"] == "ServiceAccount"}
    for workload in workloads(documents):
        assert accounts[workload.spec["serviceAccountName"]] == [{"name": "registry"}]


@pytest.mark.parametrize("overlay", ["gpu", "standalone"])
def test_an_overlay_can_be_scaled_that_was_not(tmp_path: Path, overlay: str) -> None:
    documents = settled(
        tmp_path, overlay, "autoscaling monitoring pdb" if overlay == "gpu" else "autoscaling monitoring"
    )
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []


@pytest.mark.parametrize("models", ["model-cache", "model-images"])
def test_an_overlay_s_copy_may_have_its_models_by_another_way(tmp_path: Path, models: str) -> None:
    """As docs/deployment.md says: a component that an overlay has is exchanged in a copy of its list."""
    text = (K8S / "overlays" / "standalone" / "kustomization.yaml").read_text()
    copy = text.replace("components/model-init", f"components/{models}")
    assert copy != text
    (tmp_path / "kustomization.yaml").write_text(copy.replace("../../", f"{os.path.relpath(K8S, tmp_path)}/"))
    assert [sentence for policy in POLICIES for sentence in policy(render(tmp_path))] == []
