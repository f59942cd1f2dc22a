"""A second machine for tests: a network namespace with an address and shared memory of its own, on the other end of a
virtual cable. Only root may make one."""

from __future__ import annotations

import ipaddress
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

NETWORK = ipaddress.ip_address("198.18.0.0")
"""Range for tests of networks (RFC 2544); every process of tests has four addresses of its own."""


@dataclass(frozen=True)
class Machine:
    here: str
    """This machine's address, as the other one dials it."""
    there: str
    interface_here: str
    interface_there: str
    prefix: list[str] = field(default_factory=list)
    """Stands before a command that shall run there."""

    def cut(self) -> None:
        """From now on nothing that is sent arrives."""
        _ip("link", "set", self.interface_here, "down")


SAME = Machine("127.0.0.1", "127.0.0.2", "lo", "lo")
"""Another address of this machine, where no namespace can be made."""


@contextmanager
def second_machine() -> Iterator[Machine | None]:
    """None where this user may not make one."""
    name = f"slip{os.getpid() % 10**6}"
    here, there = f"{name}h", f"{name}t"
    ours, theirs = (str(NETWORK + 4 * (os.getpid() % 2**14) + number) for number in (1, 2))
    if shutil.which("ip") is None or os.geteuid():
        yield None
        return
    try:
        try:
            _ip("netns", "add", name)
            _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        except subprocess.CalledProcessError:
            yield None
            return
        _ip("addr", "add", f"{ours}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "addr", "add", f"{theirs}/30", "dev", there)
        _ip("-n", name, "link", "set", there, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        own_memory = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        yield Machine(ours, theirs, here, there, ["ip", "netns", "exec", name, *own_memory])
    finally:
        subprocess.run(["ip", "link", "del", here], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def two_free_ports() -> int:
    """The lower of two ports in a row that are free on every address, below those that the kernel gives away itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as lower, socket.socket() as higher, suppress(OSError):
            lower.bind(("", port))
            higher.bind(("", port + 1))
            return port


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
