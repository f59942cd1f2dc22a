"""Whoever waits for models to load is told which one it is, and for how long already."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from slipstream.errors import Unavailable
from slipstream.serving.loading import Loading

MODEL = "models/[big]/" + "x" * 80
"""A line is not wrapped, however long it is."""


async def begun(gate: asyncio.Event, error: Exception | None = None) -> str:
    await gate.wait()
    if error is not None:
        raise error
    return "127.0.0.1:7"


async def test_a_role_that_takes_long_is_named_where_there_is_no_terminal() -> None:
    gate, shown = asyncio.Event(), io.StringIO()
    with Loading(Console(file=shown), line_every_s=0.01) as loading:
        waiting = asyncio.gather(
            loading.watch(f"verifier loads {MODEL}", begun(gate)), loading.watch("drafter ngram starts", begun(gate))
        )
        async with asyncio.timeout(60):
            while "ngram" not in shown.getvalue() or "verifier" not in shown.getvalue():
                await asyncio.sleep(0.01)
        gate.set()
        assert await waiting == ["127.0.0.1:7"] * 2
    assert f"slipstream serve: verifier loads {MODEL}, for 0 s now\n" in shown.getvalue()
    assert "slipstream serve: drafter ngram starts, for 0 s now\n" in shown.getvalue()


async def test_on_a_terminal_each_role_has_a_clock_until_it_is_loaded() -> None:
    gate, shown = asyncio.Event(), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    with Loading(console) as loading:
        waiting = asyncio.ensure_future(loading.watch("verifier loads models/target", begun(gate)))
        async with asyncio.timeout(60):
            while "verifier loads models/target" not in shown.getvalue():
                await asyncio.sleep(0.01)
        assert "0:00:0" in shown.getvalue()
        gate.set()
        await waiting


async def test_a_role_that_cannot_start_is_not_watched_any_longer() -> None:
    gate = asyncio.Event()
    gate.set()
    with Loading(Console(file=io.StringIO())) as loading:
        with pytest.raises(Unavailable, match="status 1"):
            await loading.watch("verifier loads x", begun(gate, Unavailable("it ended with status 1")))
        waiting = asyncio.ensure_future(loading.watch("verifier loads x", begun(asyncio.Event())))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
