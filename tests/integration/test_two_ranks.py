"""Every family that the library can cut computes on two ranks what it computes on one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
WHOLE_KV = {"phi3", "olmo2"}
"""The library gathers what their projections give, so every rank attends with all heads, however many there are."""
UNCUT = {"gpt_oss"}
"""The library has a plan for their experts alone."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    folders = [str(save_checkpoint(family, tmp_path / family)) for family in FAMILIES if family not in UNCUT]
    folders += [str(save_checkpoint(name, tmp_path / f"{name}-1", num_key_value_heads=1)) for name in sorted(WHOLE_KV)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.two_ranks", *folders],
            cwd=ROOT,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        # The leader waits for the end of its input, and the follower for the leader, in vain.
        follower, leader = (rank.communicate(timeout=140)[0].splitlines() for rank in reversed(ranks))
    finally:
        for rank in ranks:
            rank.kill()
    seen = [line.split() for line in leader if line.startswith("family")]
    assert [Path(folder).name for folder in folders] == [name for _, name, *_ in seen]
    for _, name, difference, same, share in seen:
        assert float(difference) < 5e-5 and same == "True", name
        assert float(share) == (1.0 if name.removesuffix("-1") in WHOLE_KV else 2.0), name
    for said in (leader, follower):
        assert any(line.startswith("differ RANKS_DIFFER") and " tokens;" in line for line in said)
    assert [line.split()[0] for line in follower[-2:]] == ["pass", "message"]
    assert "waiting 1000ms" in follower[-2]
