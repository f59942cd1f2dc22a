"""`python -m tools.chart FOLDER`: the Helm chart, of k8s/chart and of what kustomize makes of k8s/overlays.

Both have one source: each overlay is rendered with placeholders in the place of its settings, models and namespace, and
the chart's template puts values there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

K8S = Path(__file__).resolve().parents[1] / "k8s"
OVERLAYS = ("local", "gpu", "standalone", "production")
NAMESPACE = "namespace-of-the-release"
"""Stands for it while kustomize renders: a placeholder would be no name."""


def write(folder: Path) -> None:
    """Raises CalledProcessError where kustomize refuses."""
    shutil.copytree(K8S / "chart", folder, dirs_exist_ok=True)
    (folder / "objects").mkdir(exist_ok=True)
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    for overlay in OVERLAYS:
        (folder / "objects" / f"{overlay}.yaml").write_text(_rendered(overlay, values))


def _rendered(overlay: str, values: dict[str, dict[str, str]]) -> str:
    """Without the Namespace, which is the release's."""
    generated = {"settings": list(values["settings"])}
    if overlay != "local":  # it has the shipped models
        generated["models"] = list(values["models"])
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [f"../overlays/{overlay}"],
        "transformers": ["../settings"],
        "configMapGenerator": [
            {"name": name, "behavior": "merge", "literals": [f"{key}=<<{key}>>" for key in keys]}
            for name, keys in generated.items()
        ],
    }
    with tempfile.TemporaryDirectory(dir=K8S) as made:
        (Path(made) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        done = subprocess.run(["kubectl", "kustomize", made], stdout=subprocess.PIPE, text=True, check=True)
    documents = [each for each in done.stdout.split("\n---\n") if "\nkind: Namespace\n" not in each]
    text = "\n---\n".join(documents).replace(NAMESPACE, "<<namespace>>")
    text = re.sub(r"(?m)(?<=[:-] )<<\w+>>$", r'"\g<0>"', text)  # a string, whatever the value looks like
    return re.sub(r"\bmodels-[a-z0-9]{10}\b", "models-<<models>>", text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
