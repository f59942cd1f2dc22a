"""What the document shows works as far as it can be tried without a cluster."""

from __future__ import annotations

import math
import os
import re
import subprocess
from pathlib import Path

from tests.manifests.policies import POLICIES
from tests.manifests.rendering import COMPONENTS, K8S, ROOT, environment, find, render, roles

TEXT = (ROOT / "docs" / "deployment.md").read_text("utf-8")


def shown(name: str, folder: Path) -> Path:
    """The overlay of `examples` that the document has the reader copy, beside those that it stands on."""
    assert f"examples/overlays/{name}" in TEXT
    text = (ROOT / "examples" / "overlays" / name / "kustomization.yaml").read_text("utf-8")
    made = folder / name
    made.mkdir()
    up = os.path.relpath(K8S, made)
    text = text.replace("../production", f"{up}/overlays/production").replace("../../settings", f"{up}/settings")
    text = text.replace("../../components/", f"{up}/components/")
    (made / "kustomization.yaml").write_text(text)
    return made


def test_the_overlay_of_ones_own_renders_and_keeps_to_every_policy(tmp_path: Path) -> None:
    documents = render(shown("mine", tmp_path))
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []
    images = {workload.spec["containers"][0]["image"] for workload in roles(documents)}
    assert all(re.match(r"registry\.example/slipstream/[\w-]+@sha256:", image) for image in images)
    assert find(documents, "PersistentVolumeClaim", "models")["spec"]["storageClassName"] == "shared-files"
    assert find(documents, "Certificate", "gateway-clients")["spec"]["dnsNames"] == ["slipstream.example"]
    scaled = [
        (name, find(documents, "ScaledObject", name)["spec"]["triggers"]) for name in ("verifier", "drafter-model")
    ]
    thresholds = {(name, each["name"]): each["metadata"]["threshold"] for name, those in scaled for each in those}
    assert (thresholds["verifier", "sessions"], thresholds["drafter-model", "needed"]) == ("22", "27")


def test_a_region_differs_only_by_its_overlay_and_keeps_to_every_policy(tmp_path: Path) -> None:
    mine = render(shown("mine", tmp_path))
    europe = render(shown("europe", tmp_path))
    assert [sentence for policy in POLICIES for sentence in policy(europe)] == []
    changed = {(new["kind"], new["metadata"]["name"]) for old, new in zip(mine, europe, strict=True) if old != new}
    assert changed == {
        ("Certificate", "gateway-clients"),
        ("Service", "clients"),
        ("ScaledObject", "verifier"),
        ("NetworkPolicy", "store"),
    }
    names = find(europe, "Certificate", "gateway-clients")["spec"]["dnsNames"]
    annotations = find(europe, "Service", "clients")["metadata"]["annotations"]
    assert annotations["external-dns.alpha.kubernetes.io/hostname"].split(",") == names


def test_the_documented_memory_of_models_follows_from_the_settings_by_its_formula() -> None:
    line = r"of Qwen3-14B ([\d x]+) bytes are (\d+) KiB, so `VERIFIER_KV_TOKENS` = ([\d,]+) take ([\d.]+) GiB"
    told = re.search(line, " ".join(TEXT.split()))
    assert told is not None
    tokens = int(told[3].replace(",", ""))
    assert math.prod(map(int, told[1].split(" x "))) == int(told[2]) * 2**10
    assert float(told[4]) == round(tokens * int(told[2]) / 2**20, 1)
    documents = render(K8S / "overlays/gpu")
    (verifier,) = (each for each in roles(documents) if each.name == "verifier")
    values = environment(verifier.spec["containers"][0], documents)
    assert values["VERIFIER_MODEL"].startswith("Qwen/Qwen3-14B") and values["VERIFIER_KV_TOKENS"] == str(tokens)


def test_clients_inside_dial_a_name_that_the_certificate_for_them_has() -> None:
    (dialled,) = re.findall(r"may dial\s+`dns:///([\w.]+):50051`", TEXT)
    certificate = find(render(K8S / "overlays/production"), "Certificate", "gateway-clients")
    assert dialled in certificate["spec"]["dnsNames"]


def test_every_component_and_overlay_is_listed() -> None:
    rows = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", TEXT, re.MULTILINE)
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == {
        *COMPONENTS,
        *(path.name for path in (K8S / "overlays").iterdir()),
    }


NEEDS = {
    "an image registry": (
        "make images REGISTRY=registry.example/slipstream CUDA=cu130 PUSH=1",
        "make chart && helm push .cache/chart/slipstream-0.1.0.tgz oci://registry.example/charts",
    ),
    "a container engine": (
        "docker compose up --build",
        "docker build -f docker/Dockerfile --target $role -t slipstream/$role:0.1.0 .",
    ),
    "a cluster": (
        "kind create cluster",
        "kind load docker-image slipstream/$role:0.1.0",
        "kubectl apply -k k8s/overlays/local",
        "kubectl -n slipstream rollout status deployment --timeout 10m",
        "kubectl -n slipstream port-forward deployment/gateway 50051 8000 &",
        "kubectl -n slipstream get secret gateway-clients-tls -o jsonpath='{.data.ca\\.crt}' | base64 -d > ca.crt",
        "kubectl -n slipstream port-forward deployment/gateway 50051 &",
        "kubectl -n slipstream port-forward deployment/jaeger 16686 &",
        "kubectl label namespace slipstream pod-security.kubernetes.io/enforce=restricted",
    ),
    "an API server: test_first_apply.py has one in its place": (
        "kubectl create namespace slipstream",
        "kubectl -n slipstream create secret generic gateway-keys --from-file api-keys",
        "kubectl -n slipstream create secret generic gateway-store --from-literal url=rediss://...",
        "kubectl -n slipstream create secret generic redis --from-literal password=$(openssl rand -hex 24)",
        "kubectl -n slipstream create secret generic hub --from-literal token=hf_...",
        "kubectl apply --server-side --dry-run=server -k k8s/overlays/mine &&",
        "kubectl apply --server-side -k k8s/overlays/mine &&",
        "kubectl -n slipstream wait --for condition=complete --timeout 1h job -l app.kubernetes.io/name=model-cache &&",
        "kubectl -n slipstream rollout status deployment --timeout 30m",
        "helm install slipstream oci://registry.example/charts/slipstream -n slipstream --set overlay=standalone"
        " --set settings.registry=registry.example/slipstream --set settings.pool_label=cloud.google.com/gke-nodepool"
        " --set settings.verifier_pool=h100 --set settings.drafter_pool=l4-spot",
    ),
}
"""Commands that no test runs as they stand in the document, by what they need."""


def test_every_command_that_needs_a_cluster_is_listed() -> None:
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", "")
    lines = [re.sub(r"\s+", " ", re.sub(r"\s+#.*$", "", line)).strip() for line in blocks.splitlines()]
    program = r"\bkind \w|docker|podman \w|helm \w|kubectl(?! kustomize)|PUSH=1"
    needing = {line for line in lines if re.search(program, line)}
    listed = [line for those in NEEDS.values() for line in those]
    assert needing - {*listed} == set(), "list it with what it needs"
    assert {*listed} - needing == set(), "the document has these no more"
    assert len(listed) == len({*listed})


def test_only_one_page_lists_what_was_not_run() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    saying = {page.name for page in pages if "not run" in page.read_text("utf-8")}
    assert saying <= {"tested-on.md"}


VLLM = {f"registry.example/slipstream/{role}-vllm:0.1.0" for role in ("drafter", "verifier")}
"""By components that this overlay does not list."""


def test_make_builds_and_pushes_the_images_that_overlays_for_gpus_pull(tmp_path: Path) -> None:
    (command,) = re.findall(r"^(make images .*? CUDA=\S+ PUSH=1)", TEXT, re.MULTILINE)
    done = subprocess.run([*command.split(), "-s", "ENGINE=echo"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = re.findall(r"^build(.*?) --target [\w-]+ -t (\S+)", done.stdout, re.MULTILINE)
    built = {image: arguments for arguments, image in lines}
    pushed = re.findall(r"^push (\S+)$", done.stdout, re.MULTILINE)
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{os.path.relpath(K8S, tmp_path)}/overlays/standalone]\n"
        f"transformers: [{os.path.relpath(K8S, tmp_path)}/settings]\n"
        "configMapGenerator: [{name: settings, behavior: merge, literals: [registry=registry.example/slipstream]}]\n"
    )
    pulled = {container["image"] for workload in roles(render(tmp_path)) for container in workload.containers}
    assert pulled | VLLM == set(built) == set(pushed)
    assert {image for image, arguments in built.items() if "whl/cu130" in arguments} == {
        image for image in built if image.endswith("-cuda")
    }
