"""What an operator and a caller see within seconds when workers and the store of real processes go away."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import starting
from tests.e2e.test_doctor import ROOT, named, run_command
from tests.support.redis_server import redis_process

LISTEN = {"LISTEN": "127.0.0.1:0"}
WITHIN_S = 10.0
"""A process that was killed is noticed at once; a busy machine takes its time."""


async def until(look: Callable[[], Any], expected: dict[str, Any]) -> None:
    """Until these entries are seen."""
    end, seen = time.monotonic() + WITHIN_S, {}
    while time.monotonic() < end:
        found = await look()
        seen = {name: found[name] for name in expected}
        if seen == expected:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{seen} after {WITHIN_S} s, not {expected}")


async def test_only_workers_that_answer_are_counted_and_a_silent_one_is_shown_with_its_cause(tmp_path: Path) -> None:
    with redis_process(tmp_path) as store:
        async with starting() as (_, start):
            target, draft = "emulated:vocabulary=4096&base_ms=10", "emulated:vocabulary=4096&base_ms=0.1"
            roles = (("verifier_svc", "VERIFIER_", target), ("drafter_svc", "DRAFTER_", draft))
            started = await asyncio.gather(
                *(start(module, **named(prefix, MODEL=model, **LISTEN)) for module, prefix, model in 2 * roles)
            )
            verifiers, drafters = started[::2], started[1::2]
            gateway, server = await start("gateway", **named(
                "GATEWAY_", VERIFIERS=",".join(address for _, address in verifiers),
                DRAFTERS=",".join(f"model={address}" for _, address in drafters),
                TOKENIZER=str(ROOT / "models" / "target"), HTTP="127.0.0.1:0", STORE=store.url,
                REHOMING_WAIT_S="30", **LISTEN,
            ))  # fmt: skip
            async with httpx.AsyncClient(base_url=f"http://{gateway.http}") as web:

                async def listed() -> dict[str, Any]:
                    found = (await web.get("/v1/models")).json()
                    return {**found["data"][0], "store": found["store"]}

                def drafting(present: int, away: int) -> list[dict[str, Any]]:
                    return [{"name": "model", "replicas": present, "replicas_away": away}]

                await until(listed, {"verifiers": 2, "verifiers_away": 0, "drafters": drafting(2, 0),
                                     "store": {"kind": "redis", "answers": True}})  # fmt: skip
                verifiers[0][0].process.kill()
                drafters[0][0].process.kill()
                await until(listed, {"verifiers": 1, "verifiers_away": 1, "drafters": drafting(1, 1)})
                found = await listed()
                assert [each["verifiers"] for each in found["arithmetics"]] == [1]
                _, status = await run_command("status", "--server", server)
                assert status.startswith("emulated: 1 verifier, 1 away,") and "drafts, 1 of 2 replicas" in status
                shown, said = await on_a_terminal("generate", "Hello", "--max-tokens", "8", "--server", server)
                assert shown and said.startswith("8 tokens in ") and " a pass" in said and " ms a token" in said
                store.freeze()
                await until(listed, {"store": {"kind": "redis", "answers": False}})
                store.thaw()
                verifiers[1][0].process.kill()
                await until(listed, {"verifiers": 0, "verifiers_away": 2})
                assert [each["verifiers"] for each in (await listed())["arithmetics"]] == [0]
                said = await silent("generate", "Hello", "--max-tokens", "8", "--server", server)
                assert said == "slipstream: waiting for a verifier: none of 2 answers\n"


async def on_a_terminal(*words: str) -> tuple[bytes, str]:
    """What the command writes on a terminal, and on standard error."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slipstream", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=theirs, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    return shown, said.decode()


async def silent(*words: str) -> str:
    """The first line of standard error of a command that has nothing to print."""
    command = [sys.executable, "-m", "slipstream", *words]
    pipes = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(WITHIN_S):
            return (await process.stderr.readline()).decode()
    finally:
        process.kill()
        await process.wait()
