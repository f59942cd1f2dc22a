"""The images that hold no model, built by buildah from Debian's packages and run by podman: no registry is asked.

For root on a machine with debootstrap, buildah, podman and runc: SLIPSTREAM_IMAGES=debian. SLIPSTREAM_RUN holds further
options of `podman run`, such as `--ulimit nofile=1024:1024 --ulimit nproc=1000:1000` where limits cannot be raised.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from benchmarks.prompts import request
from slipstream.client.client import complete
from slipstream.rpc.channel import channel
from slipstream.serving.role import Role
from tests.support.loopback_addresses import HOST, free_port

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/slipstream-python:bookworm"
IMAGES = ("gateway", "drafter-lookup")
ENVIRONMENT = os.environ | {"STORAGE_DRIVER": "vfs"}
"""An overlay on an overlay is refused by many kernels."""
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=host")
START_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("SLIPSTREAM_IMAGES") != "debian", reason="SLIPSTREAM_IMAGES=debian builds images, as root"
    ),
    pytest.mark.timeout(3600),
]


def run(*words: str) -> str:
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip()


def podman(*words: str) -> str:
    return run("podman", "--cgroup-manager=cgroupfs", "--runtime=runc", *words)


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """The built images by role."""
    if not podman("images", "--quiet", BASE):
        run("tools/python_base", BASE)
    for role in IMAGES:
        build = f"BUILD=--layers --format docker --isolation chroot --network host --build-arg PYTHON_IMAGE={BASE}"
        run("make", "images", "ENGINE=buildah", f"ROLES={role}", "REGISTRY=localhost", build)
    return {role: f"localhost/{role}:0.1.0" for role in IMAGES}


@contextmanager
def container(image: str, health: int, **settings: str) -> Iterator[str]:
    """A running container that its own health check calls healthy, by name; removed with the block."""
    given = [f"--env={name}={value}" for name, value in settings.items()]
    name = podman("run", "--detach", *HARDENED, *os.environ.get("SLIPSTREAM_RUN", "").split(), *given, image)
    try:
        until = time.monotonic() + START_S
        while "healthy" not in podman("exec", name, "sh", "-c", f"healthcheck {HOST}:{health} && echo healthy || true"):
            assert time.monotonic() < until, podman("logs", name)
            time.sleep(0.5)
        yield name
    finally:
        podman("rm", "--force", "--time=0", name)


@asynccontextmanager
async def verifier() -> AsyncIterator[str]:
    """From this source tree: its image holds torch."""
    settings = {"VERIFIER_MODEL": "models/target", "VERIFIER_DTYPE": "float32", "VERIFIER_LISTEN": f"{HOST}:0"}
    settings |= {"VERIFIER_ALWAYS_SPECULATE": "true", "VERIFIER_MEASURE_S": "0", "OMP_NUM_THREADS": "1"}
    role = Role("verifier_svc", settings)
    try:
        yield await role.start()
    finally:
        await role.end()


async def test_containers_of_a_gateway_and_a_drafter_serve_a_request(images: dict[str, str]) -> None:
    ports = [free_port() for _ in range(4)]
    gateway, gateway_health, drafter, drafter_health = ports
    drafting = {"DRAFTER_LISTEN": f"{HOST}:{drafter}", "DRAFTER_HEALTH_LISTEN": f"{HOST}:{drafter_health}"}
    drafting |= {"DRAFTER_METHOD": "ngram"}
    async with verifier() as address:
        serving = {"GATEWAY_LISTEN": f"{HOST}:{gateway}", "GATEWAY_HEALTH_LISTEN": f"{HOST}:{gateway_health}"}
        serving |= {"GATEWAY_HTTP": "off", "GATEWAY_VERIFIERS": address, "GATEWAY_DRAFTERS": f"ngram={HOST}:{drafter}"}
        with (
            container(images["drafter-lookup"], drafter_health, **drafting),
            container(images["gateway"], gateway_health, **serving) as name,
        ):
            async with channel(f"{HOST}:{gateway}") as line:
                asked = "a b c d a b c d a b c d a b"
                one = await complete(line, request(asked, 48, speculate=True, temperature=0.0, seed=11))
                other = await complete(line, request(asked, 48, speculate=False, temperature=0.0, seed=11))
            assert one.text == other.text and len(one.token_ids) == 48
            assert one.finished.statistics.accepted > 0
            podman("kill", "--signal=TERM", name)
            assert await asyncio.to_thread(podman, "wait", name) == "0"


@pytest.mark.parametrize("role", IMAGES)
def test_containers_run_without_root_and_cannot_write_or_compile(images: dict[str, str], role: str) -> None:
    look = (
        "import importlib.util as u, os, shutil; print(os.getuid(), u.find_spec('torch'),"
        " [p for p in ('/', '/opt/slipstream', '/etc') if os.access(p, os.W_OK)],"
        " [c for c in ('cc', 'gcc', 'make') if shutil.which(c)])"
    )
    extra = os.environ.get("SLIPSTREAM_RUN", "").split()
    assert (
        podman("run", "--rm", *HARDENED, *extra, "--entrypoint=python", images[role], "-c", look) == "10001 None [] []"
    )
