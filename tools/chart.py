"""`python -m tools.chart FOLDER`: the Helm chart, of k8s/chart and of what kustomize makes of k8s/overlays.

Both have one source: each overlay is rendered with placeholders in the place of its settings, models and namespace, and
the chart's template puts values there. So are the components that values switch on and off.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

K8S = Path(__file__).resolve().parents[1] / "k8s"
OVERLAYS = ("local", "gpu", "standalone", "production")
ADDED = ("autoscaling", "monitoring", "network-policies", "pdb")
"""Components that add objects and change none: the overlay `local` has none of them."""
STORE = "store-elsewhere"
POOL = K8S.parent / "examples" / "inference_pool.yaml"
NAMESPACE = "namespace-of-the-release"
"""Stands for it while kustomize renders: a placeholder would be no name."""


def write(folder: Path) -> None:
    """Raises CalledProcessError where kustomize refuses."""
    shutil.copytree(K8S / "chart", folder, dirs_exist_ok=True)
    for overlay in OVERLAYS:
        _write(folder / "objects" / f"{overlay}.yaml", _rendered(overlay))
    base = set(_rendered("local"))
    for component in ADDED:
        made = [each for each in _rendered("local", [component]) if each not in base]
        _write(folder / "components" / f"{component}.yaml", made)
    policed = set(_rendered("local", ["network-policies"]))
    made = [each for each in _rendered("local", ["network-policies", STORE]) if each not in policed]
    _write(folder / "components" / f"{STORE}.yaml", made)
    pool = POOL.read_text().replace("namespace: slipstream", f"namespace: {NAMESPACE}")
    _write(folder / "components" / "inference-pool.yaml", pool.split("\n---\n"))


def _write(path: Path, documents: Sequence[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "\n---\n".join(documents).replace(NAMESPACE, "<<namespace>>")
    text = re.sub(r"(?m)(?<=[:-] )<<\w+>>$", r'"\g<0>"', text)  # a string, whatever the value looks like
    text = re.sub(r"\bmodels-[a-z0-9]{10}\b", "models-<<models>>", text)
    path.write_text(re.sub(r"\bmodel-cache-[a-z0-9]{10}\b", "model-cache", text))  # the template hashes what it makes


def _rendered(overlay: str, components: Sequence[str] = ()) -> list[str]:
    """Its objects without the Namespace, which is the release's."""
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    generated = {"settings": list(values["settings"])}
    if overlay != "local":  # it has the shipped models
        generated["models"] = list(values["models"])
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "labels": [{"pairs": {"app.kubernetes.io/part-of": "slipstream"}, "includeTemplates": True}],
        "resources": [f"../overlays/{overlay}"],
        "components": [f"../components/{component}" for component in components],
        "transformers": ["../settings"],
        "configMapGenerator": [
            {"name": name, "behavior": "merge", "literals": [f"{key}=<<{key}>>" for key in keys]}
            for name, keys in generated.items()
        ],
    }
    with tempfile.TemporaryDirectory(dir=K8S) as made:
        (Path(made) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        done = subprocess.run(["kubectl", "kustomize", made], stdout=subprocess.PIPE, text=True, check=True)
    return [each for each in done.stdout.rstrip("\n").split("\n---\n") if "\nkind: Namespace\n" not in each]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
