"""Through the whole running system: traffic is split by the setting, and `slipstream compare` reports the result."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner, Result

from benchmarks.load_generator import run_load
from benchmarks.prompts import held_out, request
from slipstream.cli.commands import app
from tests.e2e.conftest import serving

ARMS = "old: 1 drafters=model shadow=suffix; plain: 1 off"


async def compared(server: str, *options: str) -> Result:
    """The command has an event loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["compare", "--server", server, *options])


@pytest.mark.slow
async def test_the_metrics_of_each_experiment_arm_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_EXPERIMENT", ARMS)
    asked = [request(prompt, 12, speculate=True) for prompt in held_out(30, seed=6)]
    with serving("--dtype", "float32", "--drafter=model", "--drafter=suffix") as server:
        empty = await compared(server)
        load = await run_load(server, asked, 1)
        reported = json.loads(
            (await compared(server, "--verifier-price", "2", "--drafter-price", "1", "--json")).stdout
        )
        table = (await compared(server)).stdout
    assert empty.exit_code == 1 and "[NO_SESSIONS]" in empty.stderr
    arms = reported["arms"]
    assert arms["old"]["measured"] + arms["plain"]["measured"] == len(asked)
    old, plain = (arms[name]["metrics"] for name in ("old", "plain"))
    drafted, accepted = load.total("drafted"), load.total("accepted")
    assert old["acceptance rate"]["value"] == (pytest.approx(accepted / drafted) if drafted else None)
    assert plain["tokens a round"]["value"] == 1.0 and plain["acceptance rate"]["value"] is None
    assert plain["TPOT mean"]["value"] > 0.0 and "difference" not in old["TPOT mean"]
    assert old["cost of 1M tokens"]["value"] > 0.0
    assert arms["old"]["shadows"]["suffix"]["tokens a round"]["value"] >= 1.0 and not arms["plain"]["shadows"]
    assert "suffix (shadow)" in table and "TPOT p95, ms" in table
