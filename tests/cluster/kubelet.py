"""The kubelet of every node: what the scheduler bound runs, what is deleted ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.cluster.api import Api
from tests.cluster.images import ROOT, store_commands
from tests.cluster.nodes import report
from tests.cluster.pod import USER, Pod


class Kubelet(threading.Thread):
    """Looks at all pods of the namespaces in `serving` twice a second."""

    def __init__(self, api: Api, folder: Path) -> None:
        super().__init__(daemon=True)
        self.serving: set[str] = set()
        self.pods: dict[str, Pod] = {}
        """By unique id."""
        self.numbers = itertools.count(2)
        """Of addresses in the cluster's network."""
        self.user = USER if _can_read_sources(USER) else str(os.geteuid())
        self._api, self._folder = api, folder
        self._lost: set[str] = set()
        self._over = threading.Event()
        store_commands(folder / "bin")

    def run(self) -> None:
        while not self._over.wait(0.5):
            with suppress(OSError):
                for namespace in list(self.serving):
                    self._look(namespace)

    def stop(self) -> None:
        self._over.set()
        self.join()
        for pod in self.pods.values():
            pod.lose()

    def lose(self, node: str) -> None:
        """The node is off: its pods have ended, it reports nothing, and what is deleted there stays."""
        self._lost.add(node)
        for pod in list(self.pods.values()):
            if pod.spec["nodeName"] == node:
                pod.lose()
        report(self._api, node, "Unknown")

    def forget(self, namespace: str) -> None:
        """What runs in the namespace ends at once, and nothing starts there any more."""
        self.serving.discard(namespace)
        for pod in list(self.pods.values()):
            if pod.meta["namespace"] == namespace:
                pod.lose()

    def _look(self, namespace: str) -> None:
        for pod in self._api.items(f"/api/v1/namespaces/{namespace}/pods"):
            meta, node = pod["metadata"], pod["spec"].get("nodeName")
            known = self.pods.get(meta["uid"])
            if node is None or node in self._lost:
                continue
            if "deletionTimestamp" in meta:
                if known is not None:
                    known.stop(float(meta.get("deletionGracePeriodSeconds", 30)))
            elif known is None and pod["status"]["phase"] in ("Pending", "Running"):
                made = self.pods[meta["uid"]] = Pod(self._api, pod, next(self.numbers), self._folder, self.user)
                made.start()


def _can_read_sources(user: str) -> bool:
    """Whether the images' user may enter the folders of this interpreter and of the repository."""
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    words += [sys.executable, "-c", "import slipstream, sys; print(sys.version, sys.base_prefix)"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    tried = subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, check=False)
    return tried.stdout.strip() == f"{sys.version} {sys.base_prefix}"
