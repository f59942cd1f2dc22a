"""One TCP connection from each follower of a group of nodes to the leader; each end learns within seconds that the
other is gone. vLLM's own connections between nodes do not report it: a worker waits for the others for ever.

Both ends must run the same model with the same options, so a follower sends its own before it starts, and what makes it
fail before it ends. Nothing else travels here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

PORT_ABOVE = 1
"""The link's port, counted from vLLM's `--master-port`."""
JOIN_S = 1800.0
"""Seconds for which nodes of a group wait for each other."""
RETRY_S = 0.5
HELLO_S = 10.0
"""Seconds for which a leader waits for a connection's first message, and a follower for the answer."""
KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""A machine that is lost without a word is noticed after 4 s."""
LONGEST = 1 << 16
"""Bytes of a message at most."""

Settings = Mapping[str, str]


class Nodes(NamedTuple):
    """A group of machines whose workers share one model."""

    size: int
    rank: int
    """This machine's number; machine 0 leads."""
    address: str
    """The leader's, as followers dial it."""
    port: int
    """vLLM's `--master-port`."""


class LeaderLink:
    """The leader's end. Accepts followers from the start; `close` ends those that have joined."""

    def __init__(self, nodes: Nodes, settings: Settings, on_lost: Callable[[str], object]) -> None:
        """`on_lost` is called once, on another thread, with a sentence, when a follower that joined is gone. Raises
        FailedPrecondition for a port that is taken."""
        self._nodes = nodes
        self._settings = dict(settings)
        self._on_lost = on_lost
        self._joined: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._lost = ""
        """Why followers that end from now on are no loss."""
        try:
            self._listener = socket.create_server(("", nodes.port + PORT_ABOVE))
        except OSError as error:
            raise FailedPrecondition(
                f"the port {nodes.port + PORT_ABOVE} for other nodes cannot be used: {error.strerror}.",
                reason="NODE_PORT",
            ) from error
        threading.Thread(target=self._accept, name="vllm-nodes", daemon=True).start()

    def wait(self, limit_s: float = JOIN_S) -> None:
        """Returns when all followers have joined. Raises FailedPrecondition when they do not, or one is lost."""
        others = range(1, self._nodes.size)
        with self._changed:
            joined = self._changed.wait_for(lambda: self._lost or len(self._joined) == len(others), limit_s)
            if self._lost:
                raise FailedPrecondition(f"{self._lost}.", reason="NODE_LOST")
            if not joined:
                missing = ", ".join(str(rank) for rank in others if rank not in self._joined)
                raise FailedPrecondition(
                    f"node {missing} of {self._nodes.size} did not join within {limit_s:g} s.", reason="NODE_MISSING"
                )

    def close(self) -> None:
        """Lets followers end."""
        self._lost = self._lost or "the link is closed"
        for each in (self._listener, *self._joined.values()):
            _hang_up(each)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection until it ends."""
        with connection:
            rank = self._welcome(connection)
            if rank is None:
                return
            why = _last_words(connection)
            with self._changed:
                if self._lost:
                    return
                self._lost = f"node {rank} failed: {why.rstrip('.')}" if why else f"node {rank} is gone"
                self._changed.notify_all()
            self._on_lost(self._lost)

    def _welcome(self, connection: socket.socket) -> int | None:
        """The rank of a follower that joins; None for anything else."""
        try:
            connection.settimeout(HELLO_S)
            hello = json.loads(_line(connection))
            rank, settings = hello["rank"], hello["settings"]
            refusal = self._refusal(rank, settings)
            with self._changed:
                if not refusal and rank in self._joined:
                    refusal = f"there are two nodes with --node-rank {rank}"
                connection.sendall(json.dumps({"refused": refusal}).encode() + b"\n")
                if refusal:
                    log.error("a node was refused: %s", refusal)
                    return None
                _keep_alive(connection)
                self._joined[rank] = connection
                self._changed.notify_all()
        except (OSError, ValueError, TypeError, KeyError):
            log.warning("refused a connection that is from no node of this group")
            return None
        return int(rank)

    def _refusal(self, rank: object, settings: Settings) -> str:
        """A sentence, or an empty string for a follower with the leader's settings."""
        if rank not in range(1, self._nodes.size):
            return f"--node-rank {rank} is not in a group of {self._nodes.size}"
        names = sorted(self._settings.keys() | settings.keys())
        differing = [name for name in names if self._settings.get(name) != settings.get(name)]
        return ", ".join(
            f"{name} is {settings.get(name)} on node {rank} and {self._settings.get(name)} on the leader"
            for name in differing[:3]
        )


class FollowerLink:
    """A follower's end, joined when the constructor returns."""

    def __init__(self, nodes: Nodes, settings: Settings, limit_s: float = JOIN_S) -> None:
        """Waits for the leader. Raises FailedPrecondition when it refuses this node, or is not there in time."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                answer = self._join(nodes, settings)
                break
            except (OSError, ValueError) as error:  # its name may not be known yet, either
                if time.monotonic() > deadline:
                    raise FailedPrecondition(
                        f"the leader at {nodes.address}:{nodes.port + PORT_ABOVE} did not answer within "
                        f"{limit_s:g} s: {error}.",
                        reason="LEADER_MISSING",
                    ) from error
                time.sleep(RETRY_S)
        if refused := answer["refused"]:
            self.close()
            raise FailedPrecondition(f"the leader refused this node: {refused}.", reason="NODE_REFUSED")
        _keep_alive(self._connection)

    def wait_until_lost(self) -> None:
        """Returns when the leader is gone."""
        _last_words(self._connection)

    def close(self, why: str = "") -> None:
        """Ends the connection, after sending the leader the reason."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps({"failed": why}).encode() + b"\n")
        _hang_up(self._connection)

    def _join(self, nodes: Nodes, settings: Settings) -> dict[str, str]:
        connection = socket.create_connection((nodes.address, nodes.port + PORT_ABOVE), timeout=HELLO_S)
        try:
            connection.sendall(json.dumps({"rank": nodes.rank, "settings": dict(settings)}).encode() + b"\n")
            answer: dict[str, str] = json.loads(_line(connection))
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return answer


def _line(connection: socket.socket) -> bytes:
    """One message; what was received of it when the connection ended. Raises OSError; ValueError for a long one."""
    received = b""
    while not received.endswith(b"\n"):
        if len(received) > LONGEST:
            raise ValueError("a message is too long")
        more = connection.recv(LONGEST)
        if not more:
            break
        received += more
    return received


def _last_words(connection: socket.socket) -> str:
    """Waits until the other end is gone; returns the failure that it sent, if any."""
    try:
        connection.settimeout(None)
        return str(json.loads(_line(connection))["failed"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _hang_up(connection: socket.socket) -> None:
    """Wakes whoever waits for the connection, too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
