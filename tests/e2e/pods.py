"""A small stand-in for Kubernetes: pods are real processes with addresses of their own, a headless Service is a name in
the gateway's own /etc/hosts that stands for the ready ones, and a rollout waits for readiness."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import Unavailable
from slipstream.process import END_WITH_PARENT
from slipstream.serving.role import READY, Role
from tests.e2e.conftest import ROOT
from tests.support.health_check import healthy

NUMBERS = itertools.count(2)
MOUNTED = 'mount --bind "$0" /etc/hosts && exec "$@"'


def free_port(host: str) -> int:
    with socket.socket() as held:
        held.bind((host, 0))
        return int(held.getsockname()[1])


@dataclass(eq=False)
class Pod:
    role: Role
    address: str
    health: str

    async def stop(self) -> int:
        """SIGTERM, as the kubelet does; the exit status."""
        self.role.process.terminate()
        async with asyncio.timeout(120):
            return await self.role.ended()


@dataclass(eq=False)
class Deployment:
    """Pods of one role behind one name. `maxSurge: 1, maxUnavailable: 0`."""

    name: str
    module: str
    prefix: str
    hosts: Hosts
    stack: AsyncExitStack
    port: int = field(default_factory=lambda: free_port("127.0.1.1"))
    pods: list[Pod] = field(default_factory=list)

    async def add(self, **settings: str) -> Pod:
        """A pod that is sent work as soon as it is ready. Raises Unavailable for one that ends, TimeoutError for one
        that never is."""
        host = f"127.0.1.{next(NUMBERS)}"  # other tests' clients have ports of 127.0.0.2 and 127.0.0.3
        own = {"LISTEN": f"{host}:{self.port}", "HEALTH_LISTEN": f"{host}:0", "GRACE_S": "1"} | settings
        role = Role(self.module, {f"{self.prefix}_{key}": value for key, value in own.items()})
        self.stack.push_async_callback(role.end)
        health = f"{host}:{free_port(host)}"
        address = await role.start({f"{self.prefix}_HEALTH_LISTEN": health})
        pod = Pod(role, address, health)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(healthy, health):
                await asyncio.sleep(0.05)
        self.pods.append(pod)
        self.hosts.publish(self)
        return pod

    async def remove(self, pod: Pod) -> None:
        self.pods.remove(pod)
        self.hosts.publish(self)
        assert await pod.stop() == 0

    async def roll_out(self, **settings: str) -> bool:
        """Every pod is replaced by one with these settings, one after the other; False where a new one does not become
        ready: then all that were there still are."""
        for pod in list(self.pods):
            try:
                await self.add(**settings)
            except (Unavailable, TimeoutError):
                return False
            await self.remove(pod)
        return True


class Hosts:
    """What the gateway resolves names by."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._deployments: dict[str, list[str]] = {}
        file.write_text("127.0.0.1 localhost\n")

    def publish(self, deployment: Deployment) -> None:
        self._deployments[deployment.name] = [pod.address.rpartition(":")[0] for pod in deployment.pods]
        lines = [f"{host} {name}\n" for name, found in self._deployments.items() for host in found]
        self.file.write_text("127.0.0.1 localhost\n" + "".join(lines))


async def start_gateway(stack: AsyncExitStack, hosts: Hosts, **settings: str) -> str:
    """The address of a gateway that sees these hosts; in a mount namespace of its own, which needs root."""
    own = {"LISTEN": "127.0.0.1:0", "TOKENIZER": str(ROOT / "models" / "target")} | settings
    environment = dict(os.environ) | {f"GATEWAY_{key}": value for key, value in own.items()} | {END_WITH_PARENT: "1"}
    command = ["unshare", "--mount", "sh", "-c", MOUNTED, str(hosts.file), sys.executable, "-m", "gateway"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)

    async def end() -> None:
        process.terminate()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = (await process.stdout.readline()).decode()
    assert line.startswith(READY), line
    return line.removeprefix(READY).split()[0]


async def seconds_until(condition: object) -> float:
    """Until an awaitable check comes true."""
    began = time.monotonic()
    async with asyncio.timeout(120):
        while not await condition():  # type: ignore[operator]
            await asyncio.sleep(0.02)
    return time.monotonic() - began
