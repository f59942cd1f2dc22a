"""What the suite forks in place of `python -m` behaves as that does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from slipstream.errors import Unavailable
from slipstream.process import PATIENT_THREADS
from slipstream.serving.role import Role
from tests.support import forked_processes
from tests.support.forked_processes import ForkedProcess, run_command

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def forking() -> None:
    if forked_processes._template is None:
        pytest.skip("this machine forks no processes for tests")


def role(**settings: str) -> Role:
    return Role("drafter_svc", {"DRAFTER_METHOD": "suffix", "DRAFTER_LISTEN": "127.0.0.1:0"} | settings)


async def test_a_role_is_a_child_of_its_own_that_ends_by_sigterm_with_status_0() -> None:
    first, second = role(), role()
    addresses = await asyncio.gather(first.start(), second.start())
    assert addresses[0] != addresses[1] and first.process.pid != second.process.pid
    assert isinstance(first.process, ForkedProcess)
    for each in (first, second):
        stat = Path(f"/proc/{each.process.pid}/stat").read_text().rpartition(")")[2].split()
        assert (int(stat[1]), int(stat[3])) == (os.getpid(), each.process.pid), "this process's child, with a session"
    await asyncio.gather(first.end(), second.end())
    assert (await first.ended(), await second.ended()) == (0, 0)
    assert not Path(f"/proc/{first.process.pid}").exists()


async def test_a_killed_role_has_the_signal_as_its_status() -> None:
    killed = role()
    await killed.start()
    killed.process.kill()
    assert await killed.ended() == -signal.SIGKILL


async def test_a_role_that_cannot_start_reports_why() -> None:
    with pytest.raises(Unavailable, match="nonsense"):
        await role(DRAFTER_METHOD="nonsense").start()
    with pytest.raises(Unavailable, match="nonsense"):
        await role(DRAFTER_METHOD="nonsense").check()


def test_a_command_has_its_own_folder_and_environment_and_no_descriptor_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import os, sys\n"
        "print(os.getcwd(), sorted(os.environ), sys.argv[1:], sys.warnoptions, flush=True)\n"
        "print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])\n"
        "sys.exit('a sentence')\n"
    )
    with (tmp_path / "held").open("w"):
        command = run_command(["shown", "--option"], {"PYTHONPATH": str(tmp_path), "A": "b"}, tmp_path)
        lines = command.stdout.readlines()
    assert command.wait(60) == 1
    command.stdout.close()
    assert lines == [f"{tmp_path} ['A', 'PYTHONPATH'] ['--option'] []\n", "[0, 1, 2]\n"]


def test_threads_of_tests_and_of_forked_roles_sleep_between_calls() -> None:
    """What OpenMP reads when it is loaded, with torch, and what a fork keeps."""
    assert PATIENT_THREADS.items() <= os.environ.items()
    imported = list(sys.modules)
    assert imported.index("tests") < imported.index("torch")
