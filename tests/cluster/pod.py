"""A pod as a process: environment and volumes of the cluster's objects, probes, restarts, an end within its grace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from base64 import b64decode
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import HTTPError

from tests.cluster.api import STRATEGIC, Api, Object
from tests.cluster.images import ROOT, NoSuchImage, command, environment
from tests.cluster.network import Interface
from tests.cluster.probes import succeeds

USER = "10001"
OURS = "/tmp"
"""A mount path that every process has anyway: its TMPDIR is in the pod's folder instead."""


class Pod(threading.Thread):
    """Runs from its start until `stop` or `lose`."""

    def __init__(self, api: Api, pod: Object, number: int, folder: Path, user: str) -> None:
        super().__init__(daemon=True)
        self._api, self.meta, self.spec = api, pod["metadata"], pod["spec"]
        self._folder, self._user = folder / self.meta["uid"], user
        self._folder.mkdir()
        self._shared = folder / "claims" / self.meta["namespace"]
        self._interface = Interface(number, self.meta["namespace"], self._folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._phase, self._begun, self._ready, self._restarts = "Pending", False, False, 0
        self._over = threading.Event()
        self._lost = False
        self.fault = ""
        """Why it can never run here."""
        self.path = f"/api/v1/namespaces/{self.meta['namespace']}/pods/{self.meta['name']}"

    def run(self) -> None:
        self._report()
        for container in self.spec.get("initContainers", []):  # fetch models of a hub, which is not here
            assert container["command"][0] == "hf"
        container = self.spec["containers"][0]
        if container.get("command", [""])[0] == "hf":
            self._phase = "Succeeded"
            self._report()
            return
        while not self._over.is_set():
            try:
                self._process = self._start(container)
            except (HTTPError, KeyError):  # a Secret or ConfigMap that is not there keeps a pod waiting
                self._over.wait(1)
                continue
            except NoSuchImage as error:
                self.fault = f"{self.meta['name']}: no program stands for the image {error}"
                return
            self._phase, self._begun = "Running", False
            self._report()
            self._watch(container)
            self._process.wait()
            self._set_ready(False)
            if not self._over.is_set():
                self._restarts += 1
                self._over.wait(min(10, 2**self._restarts))

    def stop(self, grace_s: float) -> None:
        """As a kubelet ends a deleted pod: preStop, SIGTERM, and SIGKILL at the end of the grace."""
        if not self._over.is_set():
            self._over.set()
            threading.Thread(target=self._end, args=(grace_s,), daemon=True).start()

    def lose(self) -> None:
        """Its node is gone: nothing runs, and nobody reports that."""
        self._lost = True
        self._over.set()
        self._kill(signal.SIGKILL)

    def log(self) -> str:
        path = self._folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _end(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        hook = self.spec["containers"][0].get("lifecycle", {}).get("preStop", {})
        if self._process is not None and self._process.poll() is None:
            time.sleep(min(grace_s, hook.get("sleep", {}).get("seconds", 0)))
            self._kill(signal.SIGTERM)
            try:
                self._process.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill(signal.SIGKILL)
                self._process.wait()
        self._interface.close()
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        with suppress(OSError):
            self._api.call("DELETE", self.path, options | {"preconditions": {"uid": self.meta["uid"]}})

    def _kill(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _start(self, container: Object) -> subprocess.Popen[bytes]:
        """Raises HTTPError or KeyError for what its environment or volumes name and is not there."""
        folders = {mount["mountPath"]: self._volume(mount["name"]) for mount in container.get("volumeMounts", [])}
        folders.pop(OURS, None)
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        self._own(home)
        values = self._values(container)
        words = [*container.get("command", command(container["image"])), *container.get("args", [])]
        words = [_here(_expanded(word, values), folders) for word in words]
        values = {name: _here(value, folders) for name, value in environment(values).items()}
        path = f"{self._folder.parent / 'bin'}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._environment = {**values, **own, "GRPC_VERBOSITY": "ERROR"}
        user = ("setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--clear-groups", "--no-new-privs")
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                self._interface.inside(*user, *words),
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=folders.get("/data", home),
                start_new_session=True,
            )

    def _volume(self, name: str) -> Path:
        """The folder behind a mount."""
        (volume,) = (each for each in self.spec["volumes"] if each["name"] == name)
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        folder = self._shared / claim if claim else self._folder / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        for source, kind, key in (("configMap", "configmaps", "name"), ("secret", "secrets", "secretName")):
            if source in volume:
                for file, text in self._data(kind, volume[source][key]).items():
                    (folder / file).write_bytes(b64decode(text) if source == "secret" else text.encode())
        self._own(folder)
        return folder

    def _own(self, folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, int(self._user), int(self._user))

    def _data(self, kind: str, name: str) -> dict[str, str]:
        found: dict[str, str] = self._api.call("GET", f"/api/v1/namespaces/{self.meta['namespace']}/{kind}/{name}")[
            "data"
        ]
        return found

    def _values(self, container: Object) -> dict[str, str]:
        """The container's environment, before anything stands for what this machine has not."""
        fields = {
            "metadata.name": self.meta["name"],
            "metadata.uid": self.meta["uid"],
            "metadata.namespace": self.meta["namespace"],
            "spec.nodeName": self.spec["nodeName"],
            "status.podIP": self._interface.address,
        }
        values: dict[str, str] = {}
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                values[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                reference = source["configMapKeyRef"]
                values[entry["name"]] = self._data("configmaps", reference["name"])[reference["key"]]
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                with suppress(*((HTTPError, KeyError) if reference.get("optional") else ())):
                    values[entry["name"]] = b64decode(
                        self._data("secrets", reference["name"])[reference["key"]]
                    ).decode()
            else:
                values[entry["name"]] = _expanded(entry.get("value", ""), values)
        return values

    def _watch(self, container: Object) -> None:
        """Asks the probes until the process ends: startup alone at first, then readiness and life."""
        assert self._process is not None
        startup, readiness, liveness = (container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness"))
        failures = missed = 0
        due = 0.0
        while self._process.poll() is None and not self._over.is_set():
            if not self._begun and startup is not None and not self._asked(startup):
                failures += 1
                if failures >= startup["failureThreshold"]:
                    self._kill(signal.SIGTERM)
                self._over.wait(min(1.0, startup["periodSeconds"]))
                continue
            self._begun = True
            self._set_ready(readiness is None or self._asked(readiness))
            if liveness is not None and time.monotonic() >= due:
                due = time.monotonic() + liveness.get("periodSeconds", 10)
                missed = 0 if self._asked(liveness) else missed + 1
                if missed >= liveness.get("failureThreshold", 3):
                    self._kill(signal.SIGKILL)
            self._over.wait((readiness or {}).get("periodSeconds", 2))

    def _asked(self, probe: Object) -> bool:
        ports = {port["name"]: port["containerPort"] for port in self.spec["containers"][0].get("ports", [])}

        def execute(words: list[str], seconds: float) -> int:
            inside = self._interface.inside(*words)
            return subprocess.run(
                inside, env=self._environment, capture_output=True, timeout=seconds, check=False
            ).returncode

        return succeeds(probe, self._interface.address, ports, execute)

    def _set_ready(self, ready: bool) -> None:
        if ready is not self._ready:
            self._ready = ready
            self._report()

    def _report(self) -> None:
        if self._lost:
            return
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        state: Object = {"waiting": {"reason": "ContainerCreating"}}
        if self._phase == "Running":
            state = {"running": {"startedAt": moment}}
        elif self._phase == "Succeeded":
            state = {"terminated": {"exitCode": 0, "reason": "Completed"}}
        holds = {"Initialized": True, "PodScheduled": True, "ContainersReady": self._ready, "Ready": self._ready}
        status = {
            "phase": self._phase,
            "podIP": self._interface.address,
            "podIPs": [{"ip": self._interface.address}],
            "startTime": moment,
            "conditions": [
                {"type": kind, "status": str(held), "lastTransitionTime": moment} for kind, held in holds.items()
            ],
            "containerStatuses": [
                {
                    "name": each["name"],
                    "image": each["image"],
                    "imageID": each["image"],
                    "state": state,
                    "ready": self._ready,
                    "started": self._begun,
                    "restartCount": self._restarts,
                }
                for each in self.spec["containers"]
            ],
        }
        with suppress(OSError):  # deleted meanwhile
            self._api.call(
                "PATCH", f"{self.path}/status", {"metadata": {"uid": self.meta["uid"]}, "status": status}, STRATEGIC
            )


def _expanded(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)


def _here(text: str, folders: dict[str, Path]) -> str:
    """The text with paths below a mount in this machine's place for it."""
    for mount, folder in folders.items():
        text = re.sub(rf"(?<![\w./]){re.escape(mount)}(?=/|$)", str(folder), text)
    return text
