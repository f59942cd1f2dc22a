"""Nodes that are made up, and volumes that are handed out: two zones, two pools of GPUs and one without."""

from __future__ import annotations

import threading
from contextlib import suppress
from urllib.error import HTTPError

from tests.cluster.api import MERGE, Api, Object

GPU: Object = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
CLASS = "local"
INFO = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion", "kubeProxyVersion")
POOLS = {"h100": (8, "192", "1900Gi", [GPU]), "l4": (2, "24", "90Gi", [GPU]), "general": (0, "16", "60Gi", [])}
"""GPUs, cores, memory and taints of a node, by pool."""


def create(api: Api) -> None:
    """Two nodes of each pool, and the storage class of claims that name none."""
    for pool, (gpus, cores, memory, taints) in POOLS.items():
        for zone in "ab":
            name = f"{pool}-{zone}"
            labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": zone}
            node = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}}
            api.call("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **node})
            amount = {"cpu": cores, "memory": memory, "pods": "110", "ephemeral-storage": "400Gi"}
            amount |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
            info = dict.fromkeys(INFO, "") | {
                "kubeletVersion": "v1",
                "operatingSystem": "linux",
                "architecture": "amd64",
            }
            report(api, name, "True", {"capacity": amount, "allocatable": amount, "nodeInfo": info})
    standard = {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    made = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": standard,
        "provisioner": "tests/local",
    }
    api.call("POST", "/apis/storage.k8s.io/v1/storageclasses", made | {"volumeBindingMode": "WaitForFirstConsumer"})


def report(api: Api, name: str, ready: str, more: Object | None = None) -> None:
    """`ready`: True, False, or Unknown as controllers write it of a node that has not reported for long."""
    condition = {"type": "Ready", "status": ready, "reason": "Reported"}
    api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition], **(more or {})}}, MERGE)


class Provisioner(threading.Thread):
    """Makes a volume for each claim whose node has been chosen."""

    def __init__(self, api: Api) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.5):
            with suppress(OSError):
                for claim in self._api.items("/api/v1/persistentvolumeclaims"):
                    self._provide(claim)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _provide(self, claim: Object) -> None:
        meta, spec = claim["metadata"], claim["spec"]
        chosen = meta.get("annotations", {}).get("volume.kubernetes.io/selected-node")
        if spec.get("volumeName") or not chosen:
            return
        volume = {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": "/nowhere"},  # pods mount folders by the claim's name
            "claimRef": {"kind": "PersistentVolumeClaim", **{key: meta[key] for key in ("namespace", "name", "uid")}},
        }
        made = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"of-{meta['uid']}"},
            "spec": volume,
        }
        with suppress(HTTPError):  # it is there, and not bound yet
            self._api.call("POST", "/api/v1/persistentvolumes", made)
