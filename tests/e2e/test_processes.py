"""The processes of `slipstream serve`: what dies, what lives on, what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.load_generator import run_load
from benchmarks.prompts import held_out, request
from slipstream.client.client import complete
from slipstream.errors import SERVING_ENDED, Unavailable
from slipstream.rpc.channel import channel
from tests.e2e.conftest import ROOT, SPECULATING, UNMEASURED, serve_command, serve_environment, serve_process
from tests.support.scraping import scrape

TOKENS, LONG, ENDLESS = 48, 150, 1500
ROLES = ("gateway", "verifier_svc", "drafter_svc")


def children(parent: int) -> dict[str, int]:
    """Running child processes by the role they run, which a forked one has as its name; of several the one that was
    started last, whatever its number: numbers begin again at some time."""
    found: list[tuple[int, str, int]] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            words = {(folder / "comm").read_text().strip(), *(folder / "cmdline").read_text().split("\0")}
        except OSError:  # it ended meanwhile
            continue
        if int(status[1]) == parent and status[0] != "Z":
            found += [(int(status[19]), role, int(folder.name)) for role in words.intersection(ROLES)]
    return {module: pid for _, module, pid in sorted(found)}


async def test_killing_the_drafter_in_the_middle_changes_no_token_and_sigterm_ends_every_process() -> None:
    prompts = held_out(4, seed=2)
    plain = [request(prompt, TOKENS, speculate=False, temperature=0.7, seed=3) for prompt in prompts]
    guessed = [request(prompt, TOKENS, speculate=True, temperature=0.7, seed=3) for prompt in prompts]
    with serve_process("--metrics", "--dtype", "float32", "--json", **SPECULATING) as process:
        ready = json.loads(process.stdout.readline())
        server, metrics = ready["grpc"], ready["metrics"]
        assert ready["http"].startswith("127.0.0.1:")
        assert list(metrics) == ["gateway", "verifier", "model"]
        expected = await run_load(server, plain, 4)
        drafter = children(process.pid)["drafter_svc"]
        async with channel(server) as line:
            received: list[str] = []
            runs = [asyncio.create_task(complete(line, one, received.append)) for one in guessed]
            while len(received) < 12:  # every session is in the middle of its text
                await asyncio.sleep(0.005)
            os.kill(drafter, signal.SIGKILL)
            completions = await asyncio.gather(*runs)
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected.completions]
        await asyncio.wait_for(speculation_is_back(server, process.pid, drafter), 300)
        gateway, decided, guessing = [await scrape(address) for address in metrics.values()]  # the new drafter's too
        assert gateway.value("slipstream_candidates_accepted_total", drafter="model", method="model") > 0
        assert decided.value("slipstream_verifier_step_seconds_count") > 0
        assert guessing.value("slipstream_drafter_sent_candidates_total") > 0
        left = children(process.pid)
        assert set(left) == {"verifier_svc", "drafter_svc", "gateway"}
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert not [pid for pid in left.values() if Path(f"/proc/{pid}").exists()]


async def speculation_is_back(server: str, serve: int, killed: int) -> None:
    """The drafter was started again, and its candidates are accepted."""
    while children(serve).get("drafter_svc", killed) == killed:
        await asyncio.sleep(0.1)
    while not (await run_load(server, [request(held_out(1)[0], TOKENS, speculate=True)], 1)).total("accepted"):
        await asyncio.sleep(0.1)


async def test_a_verifier_that_dies_is_started_again_and_one_that_cannot_be_ends_serving(tmp_path: Path) -> None:
    """Texts go on in the first case, clients hear of the end in the second."""
    target = shutil.copytree(ROOT / "models" / "target", tmp_path / "target")
    options = ("--drafter", "none", "--dtype", "float32", "--target", str(target))
    with serve_process(*options, **UNMEASURED) as process:
        server = process.stdout.readline().split()[1].removeprefix("grpc=")
        await check_that_texts_go_on_without_the_verifier(server, process.pid)
        left = children(process.pid)
        asked = request(held_out(1)[0], ENDLESS, speculate=False)
        async with channel(server) as line:
            received: list[str] = []
            running = asyncio.create_task(complete(line, asked, received.append))
            async with asyncio.timeout(60):
                while not received:
                    await asyncio.sleep(0.005)
            os.kill(left["verifier_svc"], signal.SIGSTOP)  # the text does not end while the model's files go
            shutil.rmtree(target)
            os.kill(left["verifier_svc"], signal.SIGKILL)
            with pytest.raises(Unavailable) as caught:
                await running
            assert caught.value.reason == SERVING_ENDED
        assert process.wait(timeout=60) == 1
    assert not [pid for pid in left.values() if Path(f"/proc/{pid}").exists()]


async def check_that_texts_go_on_without_the_verifier(server: str, serve: int) -> None:
    asked = [request(prompt, LONG, speculate=False, temperature=0.7, seed=3) for prompt in held_out(2, seed=2)]
    expected = await run_load(server, asked, 2)
    verifier = children(serve)["verifier_svc"]
    async with channel(server) as line:
        received: list[str] = []
        runs = [asyncio.create_task(complete(line, one, received.append)) for one in asked]
        while len(received) < 6:
            await asyncio.sleep(0.005)
        os.kill(verifier, signal.SIGKILL)
        completions = await asyncio.wait_for(asyncio.gather(*runs), 300)
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected.completions]
    assert {each.finished.statistics.rehomed for each in completions} == {1}
    assert children(serve)["verifier_svc"] != verifier


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    """`slipstream serve` and its roles as a user starts them, and not forked."""
    command, environment = serve_command("--drafter", "ngram"), serve_environment() | UNMEASURED
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_killed_serve_leaves_no_process_behind(forked: bool) -> None:
    with serve_process("--drafter", "ngram", **UNMEASURED) if forked else started() as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready grpc=")
        left = set(children(process.pid).values())
        assert len(left) == 3
        process.kill()
    until = time.monotonic() + 120
    while left and time.monotonic() < until:
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        time.sleep(0.1)
    assert not left


def test_a_listen_port_in_use_is_reported_before_any_role_serves() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            slipstream("serve", "--listen", address, "--http", "127.0.0.1:0"), cwd=ROOT, capture_output=True, text=True
        )
    assert done.returncode == 1 and not done.stdout
    assert f"cannot listen on {address}" in done.stderr


def slipstream(*words: str) -> list[str]:
    return [sys.executable, "-m", "slipstream", *words]
