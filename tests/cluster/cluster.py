"""A whole cluster: what tests apply to it, ask of it and do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.api import Api, Object, wait
from tests.cluster.control_plane import control_plane
from tests.cluster.dns import Dns
from tests.cluster.images import ROOT
from tests.cluster.kubelet import Kubelet
from tests.cluster.network import Interface, open_bridge
from tests.cluster.nodes import Provisioner, create
from tests.cluster.programs import program

PATIENCE = min(6.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
"""How many times longer things take here than alone: other work has its share of the cores. Whatever takes longer than
six times is not waited for."""
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
ROLLOUT_S, NEW_POD_S = 180.0, 30.0
APP = "app.kubernetes.io/name"
COMMAND_S = 120.0
QUIET_S = 90.0


class Cluster:
    def __init__(self, api: Api, config: Path, kubelet: Kubelet, folder: Path) -> None:
        self.api, self.kubelet, self.folder = api, kubelet, folder
        self.environment = {**os.environ, "KUBECONFIG": str(config), "HOME": str(folder), "PYTHONPATH": str(ROOT)}

    def run(self, *words: str | Path, text: str = "", fails: bool = False) -> str:
        """What a command prints, on standard error too. Raises AssertionError where its end is another one."""
        done = subprocess.run(
            words,
            env=self.environment,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            cwd=ROOT,
            check=False,
        )
        assert bool(done.returncode) == fails, f"{words}: {done.stdout[-3000:]}"
        return done.stdout

    def kubectl(self, *words: str | Path, text: str = "", fails: bool = False) -> str:
        return self.run(program("kubectl"), *words, text=text, fails=fails)

    def namespace(self, name: str, *, runs: bool = True, **secrets: Mapping[str, str]) -> None:
        """Restricted, with secrets; its pods run, or stay what the scheduler made of them."""
        made: list[Object] = [{"kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}]
        for secret, data in secrets.items():
            meta = {"name": secret.replace("_", "-"), "namespace": name}
            made.append({"kind": "Secret", "metadata": meta, "stringData": dict(data)})
        items = [{"apiVersion": "v1", **each} for each in made]
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        if runs:
            self.kubelet.serving.add(name)

    def away(self, name: str) -> None:
        """The namespace and all that is in it."""
        self.kubectl("delete", "namespace", name, "--wait=false")
        self.kubectl("-n", name, "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
        self.kubelet.forget(name)
        wait(lambda: not self._there(name), f"{name} is gone", QUIET_S * PATIENCE)

    def _there(self, name: str) -> bool:
        return name in {each["metadata"]["name"] for each in self.api.items("/api/v1/namespaces")}

    def objects(self, namespace: str, kind: str, group: str = "apps/v1") -> dict[str, Object]:
        """By name; `kind` in plural."""
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        return {each["metadata"]["name"]: each for each in self.api.items(f"{root}/namespaces/{namespace}/{kind}")}

    def pods(self, namespace: str) -> dict[str, Object]:
        return self.objects(namespace, "pods", "v1")

    def names(self, namespace: str, app: str = "") -> set[str]:
        """Of pods that have not been deleted, of one application or all."""
        found = self.pods(namespace).items()
        return {name for name, pod in found if runs(pod) and app in ("", pod["metadata"]["labels"].get(APP))}

    def available(self, namespace: str) -> bool:
        """Whether every Deployment and StatefulSet has the pods that it should, all of its present template. Raises
        AssertionError where a pod can never run here."""
        faults = {pod.fault for pod in list(self.kubelet.pods.values()) if pod.fault}
        assert not faults, faults
        found = {**self.objects(namespace, "deployments"), **self.objects(namespace, "statefulsets")}
        return bool(found) and all(_complete(each) for each in found.values())

    def wait_available(self, namespace: str, seconds: float) -> float:
        """Seconds that it took. `seconds`: at most, on a machine that has its cores for this. Raises AssertionError
        with what is not ready, and what its pods print."""
        try:
            return wait(lambda: self.available(namespace), f"all of {namespace} is available", seconds * PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.complaints(namespace)}") from error

    def complaints(self, namespace: str) -> str:
        """Pods that are not ready, with the end of their logs."""
        lines: list[str] = []
        for name, pod in self.pods(namespace).items():
            ready = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
            if ready.get("Ready") != "True":
                known = self.kubelet.pods.get(pod["metadata"]["uid"])
                lines.append(f"{name} {pod['status']['phase']} {ready}: {known.log()[-600:] if known else 'unbound'}")
        return "\n".join(lines)

    def replaces_no_gateway(
        self, namespace: str, spoil: Callable[[], object], mend: Callable[[], object], **environment: str
    ) -> None:
        """What `spoil` does to new gateways of the namespace keeps them from being ready: those that work stay, and no
        request notices. Then `mend` takes it back. `environment`: of the clients."""
        before = self.names(namespace, "gateway")
        with self.load(namespace, **environment) as seen:
            spoil()
            wait(lambda: self.names(namespace, "gateway") - before, "a new gateway starts", NEW_POD_S)
            status = ("rollout", "status", "deployment/gateway", "--timeout=30s")
            out = self.kubectl("-n", namespace, *status, fails=True)
            mend()
            self.wait_available(namespace, ROLLOUT_S)
        assert "timed out" in out, out
        assert seen["done"] and (seen["errors"], seen["changed"]) == ({}, []), seen
        assert self.names(namespace, "gateway") & before, before

    @contextmanager
    def client(self, namespace: str) -> Iterator[Interface]:
        """A place from which a pod of the namespace would speak."""
        place = Interface(next(self.kubelet.numbers), namespace, Path(tempfile.mkdtemp(dir=self.folder)))
        try:
            yield place
        finally:
            place.close()

    @contextmanager
    def load(self, namespace: str, **environment: str) -> Iterator[dict[str, Any]]:
        """Clients that go on meanwhile; afterwards the dictionary holds what they saw."""
        seen: dict[str, Any] = {}
        with self.client(namespace) as place:
            words = place.inside(sys.executable, "-m", "tests.cluster.load", namespace)
            env = {**self.environment, **environment, "OMP_NUM_THREADS": "1"}
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT) as process:
                try:
                    yield seen
                finally:
                    out, _ = process.communicate(timeout=COMMAND_S)
                    seen.update(json.loads(out))


def runs(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def _complete(owner: Object) -> bool:
    """As `kubectl rollout status` reports it."""
    spec, status, generation = owner["spec"], owner.get("status", {}), owner["metadata"]["generation"]
    counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    return status.get("observedGeneration") == generation and all(
        status.get(each, 0) == spec.get("replicas", 1) for each in counts
    )


@contextmanager
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder.chmod(0o755)  # pods have a user of their own
        open_bridge()
        api, config = stack.enter_context(control_plane(folder))
        create(api)
        Dns(api).start()
        kubelet, provisioner = Kubelet(api, folder), Provisioner(api)
        for thread in (kubelet, provisioner):
            thread.start()
            stack.callback(thread.stop)
        yield Cluster(api, config, kubelet, folder)
