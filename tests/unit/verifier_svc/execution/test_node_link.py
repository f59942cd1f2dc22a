"""The link between the nodes of a group: who joins, who is refused, and what each end learns of the other's end."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from slipstream.errors import FailedPrecondition
from tests.support.loopback_addresses import HOST
from tests.support.machines import second_machine, two_free_ports
from verifier_svc.execution.vllm.node_link import PORT_ABOVE, FollowerLink, LeaderLink, Nodes

SETTINGS = {"model": "/models/big", "tensor_parallel_size": "4"}
SOON_S = 10.0


class Group:
    """A leader of so many nodes, and what it reports."""

    def __init__(self, size: int) -> None:
        self.port = two_free_ports()
        self.lost: queue.Queue[str] = queue.Queue()
        self.leader = LeaderLink(self.nodes(0, size), SETTINGS, self.lost.put)
        self.size = size
        self.joined: list[FollowerLink] = []

    def nodes(self, rank: int, size: int = 0) -> Nodes:
        return Nodes(size or self.size, rank, HOST, self.port)

    def join(self, rank: int, **changes: str) -> FollowerLink:
        self.joined.append(FollowerLink(self.nodes(rank), SETTINGS | changes, limit_s=SOON_S))
        return self.joined[-1]


@contextmanager
def group(size: int) -> Iterator[Group]:
    opened = Group(size)
    try:
        yield opened
    finally:
        opened.leader.close()
        for follower in opened.joined:
            follower.close()


def in_background(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_the_leader_waits_for_every_node() -> None:
    with group(3) as opened:
        first = opened.join(2)
        with pytest.raises(FailedPrecondition, match=r"node 1 of 3 did not join within 0\.1 s"):
            opened.leader.wait(0.1)
        second = opened.join(1)
        opened.leader.wait(SOON_S)
        assert opened.lost.empty()
        first.close()
        second.close()


def test_a_follower_comes_before_its_leader() -> None:
    """Pods of a group start in any order."""
    port = two_free_ports()
    joined: list[FollowerLink] = []
    nodes = Nodes(2, 1, HOST, port)
    joining = in_background(lambda: joined.append(FollowerLink(nodes, SETTINGS, limit_s=SOON_S)))
    time.sleep(0.3)
    assert not joined
    leader = LeaderLink(nodes._replace(rank=0), SETTINGS, lambda why: None)
    leader.wait(SOON_S)
    joining.join(SOON_S)
    assert joined
    leader.close()
    joined[0].wait_until_lost()
    joined[0].close()


def test_a_follower_without_a_leader_gives_up() -> None:
    with pytest.raises(FailedPrecondition, match=rf"the leader at {HOST}:\d+ did not answer within 0\.2 s"):
        FollowerLink(Nodes(2, 1, HOST, two_free_ports()), SETTINGS, limit_s=0.2)


def test_a_node_with_other_settings_is_refused_with_the_difference() -> None:
    with group(2) as opened:
        with pytest.raises(FailedPrecondition, match="tensor_parallel_size is 2 on node 1 and 4 on the leader"):
            opened.join(1, tensor_parallel_size="2")
        with pytest.raises(FailedPrecondition, match="quantization is awq on node 1 and None on the leader"):
            opened.join(1, quantization="awq")
        opened.join(1)
        opened.leader.wait(SOON_S)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with group(2) as opened, pytest.raises(FailedPrecondition, match=rf"--node-rank {rank} is not in a group of 2"):
        opened.join(rank)


def test_a_second_node_of_one_rank_is_refused_and_the_first_stays() -> None:
    with group(2) as opened:
        opened.join(1)
        with pytest.raises(FailedPrecondition, match="there are two nodes with --node-rank 1"):
            opened.join(1)
        opened.leader.wait(SOON_S)
        assert opened.lost.empty()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": 1}\n', b"x" * (1 << 17)])
def test_a_connection_that_is_no_node_is_not_counted_as_one(sent: bytes) -> None:
    with group(2) as opened:
        with socket.create_connection((HOST, opened.port + PORT_ABOVE), timeout=SOON_S) as stranger:
            with suppress(OSError):
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                assert stranger.recv(100) == b""
        with pytest.raises(FailedPrecondition, match="node 1 of 2"):
            opened.leader.wait(0.05)
        opened.join(1)
        opened.leader.wait(SOON_S)
        assert opened.lost.empty()


@pytest.mark.parametrize(("why", "told"), [("", "node 1 is gone"), ("No memory.", "node 1 failed: No memory")])
def test_the_leader_learns_that_a_node_ended_once_and_why(why: str, told: str) -> None:
    with group(3) as opened:
        first, second = opened.join(1), opened.join(2)
        opened.leader.wait(SOON_S)
        first.close(why)
        assert opened.lost.get(timeout=SOON_S) == told
        second.close()
        with pytest.raises(queue.Empty):
            opened.lost.get(timeout=0.2)
        with pytest.raises(FailedPrecondition, match=told):
            opened.leader.wait(SOON_S)


def test_a_node_that_ends_while_the_leader_waits_for_others_ends_the_wait() -> None:
    with group(3) as opened:
        first = opened.join(1)
        in_background(lambda: (time.sleep(0.2), first.close("why")))
        with pytest.raises(FailedPrecondition, match="node 1 failed: why"):
            opened.leader.wait(SOON_S)


def test_followers_learn_that_the_leader_ended_and_its_own_end_is_no_loss() -> None:
    with ExitStack() as stack:
        opened = stack.enter_context(group(3))
        followers = [opened.join(rank) for rank in (1, 2)]
        opened.leader.wait(SOON_S)
        waiting = [in_background(follower.wait_until_lost) for follower in followers]
        time.sleep(0.1)
        assert all(thread.is_alive() for thread in waiting)
        opened.leader.close()
        for thread in waiting:
            thread.join(SOON_S)
            assert not thread.is_alive()
        with pytest.raises(queue.Empty):
            opened.lost.get(timeout=0.2)


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with group(2) as opened, pytest.raises(FailedPrecondition, match=f"port {opened.port + PORT_ABOVE} .*in use"):
        LeaderLink(opened.nodes(0), SETTINGS, lambda why: None)


def test_a_node_that_is_lost_without_a_closed_connection_is_detected() -> None:
    """No packet says that the connection ended: the cable is cut."""
    with second_machine() as machine:
        if machine is None:
            pytest.skip("this user may not make network namespaces")
        with group(2) as opened:
            nodes = opened.nodes(1)._replace(address=machine.here)
            following = f"link = node_link.FollowerLink(node_link.Nodes{tuple(nodes)!r}, {SETTINGS!r})"
            lines = ["from verifier_svc.execution.vllm import node_link", following, "link.wait_until_lost()"]
            follower = subprocess.Popen([*machine.prefix, sys.executable, "-c", "; ".join(lines)])
            try:
                opened.leader.wait(4 * SOON_S)
                machine.cut()
                assert opened.lost.get(timeout=SOON_S) == "node 1 is gone"
                assert follower.wait(timeout=SOON_S) == 0
            finally:
                follower.kill()
                follower.wait()
