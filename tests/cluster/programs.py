"""The programs that a cluster is made of, and which of them are missing here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASSETS = "KUBEBUILDER_ASSETS"
"""The variable with the folder of the control plane's programs, as for envtest of Kubernetes' controller-runtime."""
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
TELEMETRY = ("otelcol", "jaeger")
"""An OpenTelemetry collector with the contrib components, and Jaeger 2; expected in the same folder."""
SYSTEM = ("kubectl", "npm", "ip", "unshare", "setpriv", "prometheus")
"""npm brings helm (tools/helm)."""
STORES = (("valkey-server", "valkey-cli"), ("redis-server", "redis-cli"))
"""Server and command of a store: either pair will do."""


def program(name: str) -> str:
    """The path of a program, of the assets first. Raises KeyError for one that `missing` would name."""
    asset = Path(os.environ.get(ASSETS, "/nonexistent")) / name
    found = str(asset.resolve()) if os.access(asset, os.X_OK) else shutil.which(name)
    if found is None:
        raise KeyError(name)
    return found


@contextmanager
def running(folder: Path, name: str, *options: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program, in the folder and until the block ends; its log lies in the folder. `environment`: what it has
    beside this process's own."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [program(name), *options], env=os.environ | environment, stdout=log, stderr=log, cwd=folder
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def store() -> tuple[str, str]:
    """The paths of a store's server and of its command. Raises KeyError where there is no pair."""
    for server, command in STORES:
        if shutil.which(server) and shutil.which(command):
            return program(server), program(command)
    raise KeyError(STORES[0][0])


def missing() -> list[str]:
    """A sentence for each thing without which no cluster starts here."""
    found: list[str] = []
    if ASSETS not in os.environ:
        found.append(f"{ASSETS} is not set: it names the folder with {', '.join(CONTROL_PLANE + TELEMETRY)}.")
    else:
        absent = [name for name in CONTROL_PLANE + TELEMETRY if not _there(name)]
        found += [f"{os.environ[ASSETS]} ({ASSETS}) has no {name}." for name in absent]
    found += [f"{name} is not on this machine." for name in SYSTEM if not _there(name)]
    try:
        store()
    except KeyError:
        found.append(f"neither {' nor '.join(server for server, _ in STORES)} is on this machine, with its command.")
    if os.geteuid() != 0:
        found.append("network namespaces need root.")
    return found


def _there(name: str) -> bool:
    try:
        return bool(program(name))
    except KeyError:
        return False
