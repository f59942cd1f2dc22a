"""The file of API keys while a gateway runs: what happens to it is told once, and when it is well again."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from gateway.auth.api_keys import ApiKeys
from gateway.request_context import RequestContext
from slipstream.client.gateway_endpoint import digest
from slipstream.errors import InvalidArgument, Unauthenticated


def line(name: str, **limits: object) -> str:
    given = "".join(f", {limit} = {value}" for limit, value in limits.items())
    return f'{name} = {{ sha256 = "{digest(name).hex()}"{given} }}\n'


def opens(keyring: ApiKeys, key: str) -> bool:
    context = RequestContext([("authorization", f"Bearer {key}")], peer="ipv4:127.0.0.1:1")
    try:
        asyncio.run(keyring.authenticate(context))
    except Unauthenticated:
        return False
    return True


@pytest.mark.parametrize("trouble", ["gone", "nonsense", "unreadable"])
def test_a_broken_keys_file_is_logged_once_and_its_repair_once(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gateway.auth.api_keys")
    file, fresh, kept = tmp_path / "keys.toml", tmp_path / "fresh.toml", tmp_path / "kept.toml"
    file.write_text(line("alice"))
    keyring = ApiKeys(str(file))
    os.link(file, kept)
    for name in ("bob", "alice"):
        caplog.clear()
        with monkeypatch.context() as patched:
            if trouble == "gone":
                file.unlink()
            elif trouble == "nonsense":
                fresh.write_text("alice = nonsense")
                fresh.replace(file)
            else:
                fresh.write_text(line(name))
                fresh.replace(file)
                patched.setattr(Path, "read_bytes", denied)
            for _ in range(3):
                assert opens(keyring, "alice") is (name == "bob") and not opens(keyring, "stranger")
            (told,) = caplog.records
            assert told.levelno == logging.ERROR and "the former API keys stay" in told.message
        if trouble != "unreadable":
            fresh.write_text(line(name))
            fresh.replace(file)
        for _ in range(3):
            assert opens(keyring, name)
        assert ["changed" in told.message or "again" in told.message for told in caplog.records[1:]] == [True] * 2


def test_a_file_that_was_away_comes_back_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.auth.api_keys")
    file, away = tmp_path / "keys.toml", tmp_path / "away.toml"
    file.write_text(line("alice"))
    keyring = ApiKeys(str(file))
    file.rename(away)
    assert opens(keyring, "alice")
    away.rename(file)
    assert opens(keyring, "alice") and opens(keyring, "alice")
    assert [told.levelno for told in caplog.records] == [logging.ERROR, logging.INFO]


def test_an_invalid_keys_file_is_read_once_for_many_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, reads, read = tmp_path / "keys.toml", [], Path.read_bytes
    file.write_text(line("alice"))
    keyring = ApiKeys(str(file))
    file.write_text("alice = nonsense")
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))
    for _ in range(3):
        assert opens(keyring, "alice") and not opens(keyring, "stranger")
    assert reads == [file]


@pytest.mark.parametrize(
    ("limit", "value", "wanted"),
    [
        ("sessions", 0, "above zero"),
        ("least_priority", -(2**31) - 1, "from -2147483648"),
        ("least_priority", 1.5, "from"),
    ],
)
def test_an_invalid_limit_is_refused_with_the_values_it_may_have(
    tmp_path: Path, limit: str, value: float, wanted: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(line("alice", **{limit: value}))
    with pytest.raises(InvalidArgument, match=f"{limit} must be a whole number {wanted}"):
        ApiKeys(str(file))


def denied(*_: object) -> bytes:
    raise PermissionError(13, "Permission denied")
