"""An address of this machine on which no other process takes a port: clients dial from 127.0.0.1. So a server finds
its port free when it starts again."""

from __future__ import annotations

import socket
from contextlib import suppress

HOST = "127.0.0.66"
ANY = f"{HOST}:0"


def free_port() -> int:
    """One whose port 10,000 higher is free too: nodes of a Redis cluster talk to each other there."""
    while True:
        with socket.socket() as probe, socket.socket() as higher, suppress(OSError, OverflowError):
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
            higher.bind((HOST, port + 10_000))
            return port
