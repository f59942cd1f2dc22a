"""Whatever ends a role's process, the last it writes says what."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from slipstream.process import ALLOCATOR

ROLE = """
import asyncio, logging, os, signal, sys
from slipstream.errors import FailedPrecondition
from slipstream.process import run_role, until_signal
logging.basicConfig(level="INFO", format="%(message)s")
async def serve():
    {}
run_role("verifier", serve())
"""
SELF = "os.kill(os.getpid(), signal.{})"
ENDED_WHEN_READY = (
    f"import builtins; builtins.print = lambda *_, **__: {SELF.format('SIGTERM')}; await until_signal('ready')"
)
WAITING = "asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.{}); await until_signal()"


def end_of(body: str) -> tuple[int, str]:
    """Status, and what it wrote."""
    ended = subprocess.run([sys.executable, "-c", ROLE.format(body)], stderr=subprocess.PIPE, text=True, timeout=120)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        ("raise FailedPrecondition('no target.')", 1, "verifier: no target."),
        ("raise ExceptionGroup('', [FailedPrecondition('no target.')])", 1, "verifier: no target."),
        ("raise RuntimeError('a bug')", 1, "RuntimeError: a bug"),
        ("sys.exit(0)", 0, "verifier: something ended the process with status 0"),
        ("await asyncio.to_thread(sys.exit, 3)", 3, "verifier: something ended the process with status 3"),
        (SELF.format("SIGTERM"), -signal.SIGTERM, "verifier: ended by SIGTERM"),
        (SELF.format("SIGUSR1"), -signal.SIGUSR1, "verifier: ended by SIGUSR1"),
        (WAITING.format("SIGTERM"), 0, "the process ends: SIGTERM"),
        (WAITING.format("SIGINT"), 0, "the process ends: SIGINT"),
        (ENDED_WHEN_READY, 0, "the process ends: SIGTERM"),
    ],
)
def test_the_last_line_states_what_ended_the_process(body: str, status: int, line: str) -> None:
    assert [(code, said.splitlines()[-1]) for code, said in [end_of(body)]] == [(status, line)]


def test_a_crash_of_the_interpreter_is_reported() -> None:
    status, said = end_of(SELF.format("SIGSEGV"))
    assert status == -signal.SIGSEGV and said.startswith("Fatal Python error: Segmentation fault\n")


def test_a_process_whose_parent_is_gone_reports_it() -> None:
    parent = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE).stdout.readline()
"""
    body = "asyncio.get_running_loop().call_later(0.01, lambda: print('waits', flush=True)); await until_signal()"
    ended = subprocess.run(  # until the last that has its standard error is gone
        [sys.executable, "-c", parent, ROLE.format(body)],
        env=os.environ | {"SLIPSTREAM_END_WITH_PARENT": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert ended.stderr == "the process ends: its parent process is gone\n"


KEEPING = """
import sys
from slipstream.process import return_memory
if sys.argv[1] == "returning":
    return_memory()
def held_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
before, kept = held_mib(), []
for _ in range(100):
    large = [b"x" * (1 << 20) for _ in range(2)]
    kept.append((b"x" * (1 << 17), large))
kept = [small for small, _ in kept]
del large
print(held_mib() - before)
"""
LARGE_MIB = 200


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_large_buffers_go_back_to_the_kernel_although_small_ones_behind_them_stay() -> None:
    held = {}
    for how in ("keeping", "returning"):
        command = [sys.executable, "-c", KEEPING, how]
        held[how] = int(subprocess.run(command, env=os.environ | ALLOCATOR, stdout=subprocess.PIPE, check=True).stdout)
    assert held["keeping"] > LARGE_MIB
    assert held["returning"] < LARGE_MIB / 4
