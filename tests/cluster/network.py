"""A network of this cluster alone: a bridge, and a network namespace with one address for each pod and for clients."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.dns import ADDRESS

BRIDGE = "pods"


def ip(*words: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def open_bridge() -> None:
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", f"{ADDRESS}/16", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")


class Interface:
    """A network namespace on the bridge, with one address and the names of one namespace of the cluster."""

    def __init__(self, number: int, namespace: str, folder: Path) -> None:
        """Numbers are unique, and from 2."""
        self.name, self.address = f"p{number}", f"10.244.{number >> 8}.{number & 255}"
        self._resolver = folder / "resolv.conf"
        search = f"{namespace}.svc.cluster.local svc.cluster.local cluster.local"
        self._resolver.write_text(f"nameserver {ADDRESS}\nsearch {search}\noptions ndots:5 timeout:1\n")
        ip("netns", "add", self.name)
        ip("link", "add", f"v{self.name}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", f"v{self.name}", "master", BRIDGE, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/16", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def inside(self, *words: str) -> list[str]:
        """The command, run in there: `ip netns exec` has mounts of its own."""
        script = 'mount --bind "$0" /etc/resolv.conf; exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-ec", script, str(self._resolver), *words]

    def close(self) -> None:
        ip("netns", "del", self.name)
