"""The images as containers: read-only, without privileges or root, killed in the middle, ended by SIGTERM.

For machines where the images were built (docs/deployment.md): SLIPSTREAM_CONTAINERS names the command, `podman` or
`docker`, and SLIPSTREAM_VERSION the tag.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.prompts import request
from slipstream.client.client import complete
from slipstream.rpc.channel import channel

COMMAND = os.environ.get("SLIPSTREAM_CONTAINERS", "")
TAG = os.environ.get("SLIPSTREAM_VERSION", "0.1.0")
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=host")
START_S = 90.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMMAND, reason="SLIPSTREAM_CONTAINERS names no container engine"),
    pytest.mark.timeout(300),
]


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def engine(*words: str) -> str:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


class Container:
    """One role in a container of its own, on this host's network."""

    def __init__(self, role: str, **settings: str) -> None:
        self.port, self.health = free_ports(2)
        ports = {"LISTEN": f"127.0.0.1:{self.port}", "HEALTH_LISTEN": f"127.0.0.1:{self.health}"}
        if role == "gateway":
            ports["HTTP"] = "127.0.0.1:0"
        given = [f"--env={role.upper()}_{name}={value}" for name, value in (settings | ports).items()]
        self.name = engine("run", "--detach", *HARDENED, *given, f"slipstream/{role}:{TAG}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def healthy(self) -> bool:
        """By the command of the image's HEALTHCHECK, inside the container."""
        asked = [COMMAND, "exec", self.name, "healthcheck", f"127.0.0.1:{self.health}"]
        return subprocess.run(asked, capture_output=True, check=False, timeout=60).returncode == 0

    def started(self) -> Container:
        until = time.monotonic() + START_S
        while not self.healthy():
            assert time.monotonic() < until, engine("logs", self.name)
            time.sleep(0.5)
        return self

    def signal(self, name: str) -> None:
        engine("kill", "--signal", name, self.name)

    def status(self) -> int:
        """Exit status of the process, once it has ended."""
        return int(engine("wait", self.name))

    def remove(self) -> None:
        subprocess.run([COMMAND, "rm", "--force", self.name], capture_output=True, check=False, timeout=60)


Start = Callable[..., Container]


@pytest.fixture
def start() -> Iterator[Start]:
    containers: list[Container] = []

    def run(role: str, **settings: str) -> Container:
        containers.append(Container(role, **settings))
        return containers[-1]

    yield run
    for container in reversed(containers):
        container.remove()


def system(start: Start) -> dict[str, Container]:
    """Verifier, two drafters and a gateway that knows them, all ready."""
    verifier = start("verifier", DTYPE="float32")
    model, ngram = start("drafter", DTYPE="float32"), start("drafter", METHOD="ngram")
    named = f"model={model.address},ngram={ngram.address}"
    gateway = start("gateway", VERIFIERS=verifier.address, DRAFTERS=named)
    found = {"verifier": verifier, "model": model, "ngram": ngram, "gateway": gateway}
    return {name: container.started() for name, container in found.items()}


async def test_containers_generate_what_processes_generate_and_a_killed_drafter_changes_no_token(
    start: Start, server: str
) -> None:
    asked = request("def read(self, path):\n", 96, speculate=True, temperature=0.7, seed=11)
    async with channel(server) as line:
        expected = await complete(line, asked)
    running = await asyncio.to_thread(system, start)
    async with channel(running["gateway"].address) as line:
        received: list[str] = []
        run = asyncio.create_task(complete(line, asked, received.append))
        while len(received) < 8:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(running["model"].signal, "KILL")
        completion = await run
    assert completion.token_ids == expected.token_ids and completion.text == expected.text
    assert completion.finished.statistics.accepted > 0
    assert await asyncio.to_thread(running["model"].status) == 137


async def test_containers_end_by_sigterm(start: Start) -> None:
    running = await asyncio.to_thread(system, start)
    for container in running.values():
        await asyncio.to_thread(container.signal, "TERM")
    assert [await asyncio.to_thread(container.status) for container in running.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("role", ["gateway", "drafter", "verifier"])
def test_no_container_runs_as_root_or_can_write_to_its_file_system(role: str) -> None:
    look = (
        "import os; print(os.getuid()); print([p for p in ('/', '/opt/slipstream', '/etc') if os.access(p, os.W_OK)])"
    )
    words = engine("run", "--rm", *HARDENED, "--entrypoint=python", f"slipstream/{role}:{TAG}", "-c", look).split("\n")
    assert words[-2:] == ["10001", "[]"]


@pytest.mark.parametrize(("role", "has"), [("gateway", "False"), ("drafter", "True"), ("verifier", "True")])
def test_torch_is_where_models_are_and_no_compiler_anywhere(role: str, has: str) -> None:
    look = (
        "import importlib.util as u, shutil; print(bool(u.find_spec('torch')));"
        "print([c for c in ('cc', 'gcc', 'g++', 'clang', 'make') if shutil.which(c)])"
    )
    words = engine("run", "--rm", *HARDENED, "--entrypoint=python", f"slipstream/{role}:{TAG}", "-c", look).split("\n")
    assert words[-2:] == [has, "[]"]
