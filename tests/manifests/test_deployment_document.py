"""What the document shows works as far as it can be tried without a cluster."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

from tests.manifests.policies import POLICIES
from tests.manifests.rendering import COMPONENTS, K8S, ROOT, find, render, roles

TEXT = (ROOT / "docs" / "deployment.md").read_text("utf-8")


def test_the_overlay_of_ones_own_renders_and_keeps_to_every_policy(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    up = os.path.relpath(K8S / "overlays", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(textwrap.dedent(shown).replace("../production", f"{up}/production"))
    documents = render(tmp_path)
    assert [sentence for policy in POLICIES for sentence in policy(documents)] == []
    images = {workload.spec["containers"][0]["image"] for workload in roles(documents)}
    assert all(re.match(r"registry\.example/slipstream/\w+@sha256:", image) for image in images)
    assert find(documents, "PersistentVolumeClaim", "models")["spec"]["storageClassName"] == "shared-files"
    assert find(documents, "Certificate", "gateway-clients")["spec"]["dnsNames"] == ["slipstream.example"]
    scaled = [
        (name, find(documents, "ScaledObject", name)["spec"]["triggers"]) for name in ("verifier", "drafter-model")
    ]
    thresholds = {(name, each["name"]): each["metadata"]["threshold"] for name, those in scaled for each in those}
    assert (thresholds["verifier", "sessions"], thresholds["drafter-model", "needed"]) == ("32", "39")
    assert thresholds["verifier", "waiting"] == "4"


def test_clients_inside_dial_a_name_that_the_certificate_for_them_has() -> None:
    (dialled,) = re.findall(r"may dial\s+`dns:///([\w.]+):50051`", TEXT)
    certificate = find(render(K8S / "overlays/production"), "Certificate", "gateway-clients")
    assert dialled in certificate["spec"]["dnsNames"]


def test_every_component_is_listed() -> None:
    rows = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", TEXT, re.MULTILINE)
    assert set(re.findall(r"`([a-z-]+)`", " ".join(rows))) == set(COMPONENTS)


def test_every_command_that_needs_a_cluster_is_marked_as_not_run() -> None:
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", "")
    needing = [
        line
        for line in blocks.splitlines()
        if re.search(r"\bkind \w|docker|podman \w|helm \w|kubectl(?! kustomize)", line)
    ]
    assert len(needing) > 15
    assert [line for line in needing if "# not run" not in line] == []
