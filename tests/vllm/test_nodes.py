"""A verifier whose tensor-parallel workers are on two nodes: the embedded engine's text, and the end of either node."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.load_generator import run_load
from slipstream.errors import InvalidArgument
from tests.support.fleet import gateway, until
from tests.support.machines import SAME, second_machine, two_free_ports
from tests.vllm.conftest import open_executor, settings
from tests.vllm.decoding import ROOT
from tests.vllm.system import (
    LIMIT_S,
    STEP_TIMEOUT_S,
    UNAVAILABLE,
    Others,
    code_of_end,
    gone,
    requests,
    running_system,
    texts_of,
    verifier_settings,
    workers,
)

TOKENS = 60


@contextmanager
def following(options: str, host: dict[str, str], prefix: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | verifier_settings(ENGINE="vllm", VLLM_ARGS=f"{options} --node-rank 1") | host
    command = [*prefix, sys.executable, "-m", "verifier_svc.vllm_follower"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_two_nodes_give_the_embedded_engine_s_text_and_one_that_is_lost_ends_the_verifier(
    others: Others,
) -> None:
    """Sessions go on elsewhere with the same text, and no worker is left on either node."""
    with second_machine() as other:
        machine = other or SAME
        options = f"--tensor-parallel-size 2 --nnodes 2 --master-addr {machine.here} --master-port {two_free_ports()}"
        here = {"VLLM_HOST_IP": machine.here, "GLOO_SOCKET_IFNAME": machine.interface_here}
        there = {"VLLM_HOST_IP": machine.there, "GLOO_SOCKET_IFNAME": machine.interface_there}
        with following(options, there, machine.prefix) as follower:
            async with running_system(others, here | {"VERIFIER_VLLM_ARGS": options}) as system:
                plain = system.plain(TOKENS)
                load = await run_load(system.on_vllm, requests(TOKENS), 4)
                assert texts_of(load) == plain
                assert load.total("accepted") > 0

                leading, led = workers(system.vllm.process.pid), workers(follower.pid)
                assert len(leading) == len(led) == 1
                async with gateway(system.vllm_address) as speaking:
                    number, session = await speaking.open([1, 2, 3], tokens=900)
                    await until(lambda: len(session.token_ids) > 10)
                    generating = await system.in_mid_text(TOKENS)
                    led[0].kill()
                    began = time.monotonic()
                    assert await code_of_end(speaking, number) == UNAVAILABLE
                    took_s = time.monotonic() - began
                assert took_s < LIMIT_S < STEP_TIMEOUT_S
                print(f"UNAVAILABLE {took_s:.3f} s after a worker of the other node was killed")
                async with asyncio.timeout(2 * LIMIT_S):
                    assert await system.vllm.ended() == 1
                    assert await generating == plain
                    _, said = await asyncio.to_thread(follower.communicate)
                    await until(lambda: gone([*leading, *led]))
        assert follower.returncode == 1
        # The leader may notice first, by its own worker.
        assert re.search(r"^verifier: (a vLLM worker was killed by SIGKILL|the leader is gone)$", said, re.MULTILINE)


def test_a_follower_s_rank_is_refused_by_a_verifier_and_a_leader_s_by_a_follower() -> None:
    from verifier_svc.vllm_follower import follow

    options = "--tensor-parallel-size 2 --nnodes 2"
    with pytest.raises(InvalidArgument, match=r"--node-rank 1: run `python -m verifier_svc\.vllm_follower` there"):
        open_executor(vllm_args=f"{options} --node-rank 1")
    with pytest.raises(InvalidArgument, match="A follower needs --node-rank, 1 or above"):
        follow(settings(vllm_args=options))
