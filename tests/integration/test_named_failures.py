"""Lines about one session name it: the log of a worker is read beside its gateway's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from tests.integration.test_drafter_protocol import Speaker
from tests.support.fleet import drafter, gateway, until, verifier


def broken(*args: Any) -> None:
    raise RuntimeError


def told(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [vars(record)["session"] for record in caplog.records if record.levelno == logging.ERROR]


async def test_a_verifier_names_the_session_whose_command_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        verifier(open_engine("emulated:base_ms=5", kv_tokens=10_000)) as serving,
        gateway(serving.address) as plain,
    ):
        number, decoded = await plain.open([7, 8, 9], tokens=5000, session_id="first", credit=8)
        await until(lambda: bool(decoded.token_ids))
        monkeypatch.setattr("verifier_svc.service.check_drafters", broken)
        await plain.command(number, attach={})
        await plain.decode([7, 8, 9], session_id="second")
        await decoded.done.wait()
    assert told(caplog) == ["first", "second"]


async def test_a_drafter_names_the_session_whose_command_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with drafter(open_engine("emulated:", kv_tokens=10_000)) as address, channel(address) as line:
        speaker = Speaker(line)
        await speaker.open(1, key={"id": "first", "epoch": 1})
        await until(lambda: bool(speaker.tokens(1)))
        monkeypatch.setattr("drafter_svc.service._tokens", broken)
        await speaker.commit(1, 3, [5])
        await speaker.open(2, key={"id": "second", "epoch": 1})
        await speaker.refused(2)
        await speaker.close()
    assert told(caplog) == ["first", "second"]
