"""The processes of `slipstream serve`: what dies, what lives on, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.prompts import held_out, request
from slipstream.client import channel
from slipstream.completion import complete
from slipstream.load import run_load
from tests.e2e.conftest import ROOT, serving
from tests.scraping import scrape

TOKENS = 48


def children(parent: int) -> dict[str, int]:
    """Running child processes by the module they run; of several the one that was started last, whatever its number:
    numbers begin again at some time."""
    found: list[tuple[int, str, int]] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if int(status[1]) == parent and status[0] != "Z" and b"-m" in words:
            found.append((int(status[19]), words[words.index(b"-m") + 1].decode(), int(folder.name)))
    return {module: pid for _, module, pid in sorted(found)}


def serve_processes() -> dict[str, int]:
    """Of the `slipstream serve` that this process started last."""
    mine = children(os.getpid())
    return children(mine["slipstream"])


async def test_killing_the_drafter_in_the_middle_changes_no_token() -> None:
    prompts = held_out(4, seed=2)
    plain = [request(prompt, TOKENS, speculate=False, temperature=0.7, seed=3) for prompt in prompts]
    guessed = [request(prompt, TOKENS, speculate=True, temperature=0.7, seed=3) for prompt in prompts]
    options = ["--metrics", "--listen", "127.0.0.1:0", "--dtype", "float32"]
    command = [sys.executable, "-m", "slipstream", "serve", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = dict(word.partition("=")[::2] for word in process.stdout.readline().split()[1:])
        server, scraped = ready["grpc"], ready["metrics"].split(",")
        assert len(scraped) == 3
        expected = await run_load(server, plain, 4)
        drafter = children(process.pid)["drafter_svc"]
        async with channel(server) as line:
            said: list[str] = []
            runs = [asyncio.create_task(complete(line, one, said.append)) for one in guessed]
            while len(said) < 12:  # every session is in the middle of its text
                await asyncio.sleep(0.005)
            os.kill(drafter, signal.SIGKILL)
            completions = await asyncio.gather(*runs)
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected.completions]
        await asyncio.wait_for(speculation_is_back(server, process.pid, drafter), 60)
        gateway, decided, guessing = [await scrape(address) for address in scraped]  # the new drafter's too
        assert gateway.value("slipstream_candidates_accepted_total", drafter="model", method="model") > 0
        assert decided.value("slipstream_verifier_step_seconds_count") > 0
        assert guessing.value("slipstream_drafter_told_tokens_total") > 0
        process.terminate()
        assert process.wait(timeout=30) == 0


async def speculation_is_back(server: str, serve: int, killed: int) -> None:
    """The drafter was started again, and its candidates are accepted."""
    while children(serve).get("drafter_svc", killed) == killed:
        await asyncio.sleep(0.1)
    while not (await run_load(server, [request(held_out(1)[0], TOKENS, speculate=True)], 1)).total("accepted"):
        await asyncio.sleep(0.1)


def test_a_killed_serve_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "slipstream", "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready grpc=")
        left = set(children(process.pid).values())
        assert len(left) == 3
        process.kill()
    until = time.monotonic() + 30
    while left and time.monotonic() < until:
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        time.sleep(0.1)
    assert not left


def test_sigterm_ends_every_process_and_says_so_by_status_zero() -> None:
    with serving() as server:
        assert server
        left = serve_processes()
        assert set(left) == {"verifier_svc", "drafter_svc", "gateway"}
    assert not [pid for pid in left.values() if Path(f"/proc/{pid}").exists()]
