"""`python -m tools.chart FOLDER`: the Helm chart, of k8s/chart and of what kustomize makes of k8s/overlays.

Both have one source: each overlay is rendered with placeholders in the place of its settings, models and namespace, and
the chart's templates put values there. What a component changes, where values switch it on or off, is the difference of
two such renderings. It is written as a patch, and the templates merge it as they merge what values say of an object.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parents[1] / "k8s"
EXAMPLES = K8S.parent / "examples"
OVERLAYS = ("local", "gpu", "standalone", "production")
SWITCHED = (
    "autoscaling",
    "monitoring",
    "network-policies",
    "pdb",
    "clients",
    "multi-gpu-verifier",
    "vllm-drafter",
    "model-init",
    "model-cache",
    "model-images",
    "spread",
    "priority",
    "api-keys",
    "mtls",
    "client-certificate",
    "public-certificate",
    "tracing",
    "collector-elsewhere",
    "store-password",
    "store-elsewhere",
)
"""Components that values switch on and off, in the order in which they are merged."""
ONE_OF = (
    ("model-init", "model-cache", "model-images"),
    ("mtls", "client-certificate"),
    ("tracing", "collector-elsewhere"),
    ("store-password", "store-elsewhere"),
)
"""Groups of components of which at most one is on: switched on, it takes the other's place."""
NEEDS = {"public-certificate": "mtls", "multi-gpu-verifier": "gpu-verifier", "vllm-drafter": "gpu-drafter"}
"""Component that each of these needs."""
SHORT_LIVED = {"GOGC": "off"}
"""Environment of kubectl and helm: a process of half a second spends a third of its CPU time on collecting garbage."""
REFERENCE = "standalone"
"""The overlay in which it is seen what a component changes: it has most of them."""
WAYS_IN = {"inference-pool": "inference_pool.yaml", "ingress": "ingress.yaml", "routes": "routes.yaml"}
"""Examples whose objects values add, by the name of the chart's file."""
NAMED_BY = {
    "env": ("name",),
    "volumes": ("name",),
    "containers": ("name",),
    "initContainers": ("name",),
    "imagePullSecrets": ("name",),
    "triggers": ("name",),
    "volumeMounts": ("mountPath",),
    "tolerations": ("key", "effect", "value"),
    "topologySpreadConstraints": ("topologyKey",),
}
"""Lists whose entries are merged one by one, and the fields by which entries differ; any other list is replaced."""
NAMESPACE = "namespace-of-the-release"
"""Stands for it while kustomize renders: a placeholder would be no name."""
Object = dict[str, Any]
Objects = dict[str, Object]


def write(folder: Path) -> None:
    """Raises CalledProcessError where kustomize refuses."""
    shutil.copytree(K8S / "chart", folder, dirs_exist_ok=True)
    listed = {overlay: _components(overlay) for overlay in OVERLAYS}
    facts = {"overlays": listed, "switched": SWITCHED, "one_of": ONE_OF, "needs": NEEDS, "named_by": NAMED_BY}
    (folder / "facts.json").write_text(json.dumps(facts))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        switches = threads.map(_switch, SWITCHED)
        overlays = threads.map(_objects, OVERLAYS, listed.values())
        plain, larger = threads.map(_settings, ([], ["gpu-verifier", "multi-gpu-verifier"]))
        for overlay, objects in zip(OVERLAYS, overlays, strict=True):
            _write(folder / "objects" / f"{overlay}.yaml", list(objects.values()))
        for component, switch in zip(SWITCHED, switches, strict=True):
            _write(folder / "components" / f"{component}.yaml", [switch])
    changed = {name: value for name, value in larger.items() if value != plain[name]}
    _write(folder / "settings.yaml", [{"base": plain, "multi-gpu-verifier": changed}])
    for name, example in WAYS_IN.items():
        text = (EXAMPLES / example).read_text().replace("namespace: slipstream", f"namespace: {NAMESPACE}")
        text = text.replace("slipstream.example", "<<client_name>>")
        _write(folder / "components" / f"{name}.yaml", list(yaml.safe_load_all(text)))


def difference(old: Any, new: Any, field: str = "") -> Any:
    """Returns the patch by which `slipstream.merge` makes `new` of `old`: None removes a field, `$patch: delete` an
    entry of a list."""
    if isinstance(old, dict) and isinstance(new, dict):
        patch = {key: None for key in old if key not in new}
        for key, value in new.items():
            if key not in old or old[key] != value:
                patch[key] = difference(old.get(key), value, key)
        return patch
    if not (isinstance(old, list) and isinstance(new, list) and field in NAMED_BY):
        return new
    before, after = ({_identity(field, each): each for each in entries} for entries in (old, new))
    removed = [_named(field, each) | {"$patch": "delete"} for name, each in before.items() if name not in after]
    changed = [(name, each) for name, each in after.items() if before.get(name) != each]
    if field == "env":  # an entry may stand in those behind it, so it is written anew, behind those that are kept
        return removed + [each for _, each in changed]
    return removed + [
        _named(field, each) | difference(before[name], each) if name in before else each for name, each in changed
    ]


def _named(field: str, entry: Object) -> Object:
    return {name: entry[name] for name in NAMED_BY[field] if name in entry}


def _identity(field: str, entry: Object) -> str:
    return json.dumps(_named(field, entry), sort_keys=True)


def _switch(component: str) -> Object:
    """Returns the changes of switching a component on, and of switching it off."""
    others = {each for group in ONE_OF if component in group for each in group} | {component}
    listed = {*_components(REFERENCE), *SWITCHED[: SWITCHED.index("clients")], NEEDS.get(component, component)} - others
    before, after = (_objects(REFERENCE, _ordered(each)) for each in (listed, listed | {component}))
    return {"on": _change(before, after), "off": _change(after, before)}


def _change(old: Objects, new: Objects) -> Object:
    return {
        "added": [each for key, each in new.items() if key not in old],
        "removed": [key for key in old if key not in new],
        "changed": {key: difference(old[key], new[key]) for key in old if key in new and old[key] != new[key]},
    }


def _ordered(components: set[str]) -> tuple[str, ...]:
    return (*sorted(components.difference(SWITCHED)), *(each for each in SWITCHED if each in components))


def _components(overlay: str) -> tuple[str, ...]:
    listed = yaml.safe_load((K8S / "overlays" / overlay / "kustomization.yaml").read_text())["components"]
    return tuple(each.rpartition("/")[2] for each in listed)


def _write(path: Path, documents: Sequence[Object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n---\n".join(yaml.dump(each, Dumper=yaml.CSafeDumper, sort_keys=False, width=10**6) for each in documents)
    text = text.replace(NAMESPACE, "<<namespace>>").replace("\n\n---\n", "\n---\n")
    text = re.sub(r'(?m)(?<=[:-] )<<\w+>>[^"\n]*$', r'"\g<0>"', text)  # a string, whatever the value looks like
    path.write_text(text)


@cache
def _objects(overlay: str, components: tuple[str, ...]) -> Objects:
    """By KIND/NAME, without the Namespace, which is the release's, and without hashes in names: the templates'."""
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    places = {"settings": {key: f"<<{key}>>" for key in values["settings"]}}
    if any(each.startswith("model-") for each in components):  # else the shipped models are served
        places["models"] = {key: f"<<{key}>>" for key in values["models"]}
    text = _rendered(overlay, components, places)
    text = re.sub(r"\bmodels-[a-z0-9]{10}\b", "models-<<models>>", text)
    text = re.sub(r"\bmodel-cache-[a-z0-9]{10}\b", "model-cache", text)
    documents = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each["kind"] != "Namespace"]
    return {f"{each['kind']}/{each['metadata']['name'].removesuffix('-<<models>>')}": each for each in documents}


def _settings(components: Sequence[str]) -> dict[str, str]:
    """Their defaults with these components."""
    documents = yaml.load_all(_rendered("base", components, {}), yaml.CSafeLoader)
    (found,) = (each["data"] for each in documents if each["metadata"]["name"] == "settings")
    return dict(found)


def _rendered(overlay: str, components: Sequence[str], places: Mapping[str, Mapping[str, str]]) -> str:
    """The overlay with these components instead of those that it lists, and ConfigMaps with this data, by name."""
    folder = K8S / "base" if overlay == "base" else K8S / "overlays" / overlay
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for field in ("resources", "transformers"):
        kustomization[field] = [f"{os.path.relpath(folder, K8S)}/{each}" for each in kustomization.get(field, [])]
        kustomization[field] = [f"../{each}" for each in kustomization[field]]
    with tempfile.TemporaryDirectory(dir=K8S) as made:
        for patch in kustomization.get("patches", []):
            if "path" in patch:
                patch["path"] = str(shutil.copy(folder / patch["path"], made)).rpartition("/")[2]
        if overlay == "base":
            kustomization = {"resources": ["../base"]}
        kustomization |= {
            "namespace": NAMESPACE,
            "components": [f"../components/{each}" for each in components],
            "transformers": ["../settings"],
            # Patches and not a generator: components come between the two, and may have settings of their own.
            "patches": [
                *kustomization.get("patches", []),
                *(
                    {"target": {"kind": "ConfigMap", "name": name}, "patch": json.dumps(_data(name, given))}
                    for name, given in places.items()
                ),
            ],
        }
        (Path(made) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        words = ["kubectl", "kustomize", made]
        done = subprocess.run(words, env=os.environ | SHORT_LIVED, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _data(name: str, given: Mapping[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": dict(given)}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
