"""A hub that cannot be reached is asked once, and the cache is asked instead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from slipstream.errors import NotFound
from slipstream.tokenizer import hub
from slipstream.tokenizer.vocabulary import check_folder, tokenizer_file

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(hub.OFFLINE, "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.reachable.cache_clear()
    yield
    hub.reachable.cache_clear()


def test_an_endpoint_that_listens_is_reachable_and_one_that_does_not_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert hub.reachable() and not constants.HF_HUB_OFFLINE
    hub.reachable.cache_clear()
    assert not hub.reachable() and constants.HF_HUB_OFFLINE and os.environ[hub.OFFLINE] == "1"
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was asked again"))
    assert not hub.reachable()


def test_a_proxy_is_asked_in_place_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.getsockname()[1]}")
        assert hub.reachable()


def test_cached_files_are_used_without_the_hub_and_missing_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--owner--name"
    commit = "0" * 40
    (kept / "snapshots" / commit).mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    (kept / "snapshots" / commit / "config.json").write_text("{}")
    check_folder("owner/name")
    assert tokenizer_file("owner/name", "config.json").read_text() == "{}"
    with pytest.raises(NotFound, match="hub cannot be reached"):
        check_folder("owner/other")


@pytest.mark.parametrize(
    "command",
    [
        "doctor --target owner/none",
        "serve --target owner/none --http off",
        "plan --gpus owner/none",
        "plan --measure owner/none",
        "train eagle --target owner/none --out {folder}/out",
    ],
)
def test_the_commands_end_before_the_hub_s_libraries_would_give_up(command: str, tmp_path: Path) -> None:
    """Those ask five times for each file, for a minute together."""
    environ = {**os.environ, "HF_ENDPOINT": NOWHERE}
    environ.pop(hub.OFFLINE)
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "slipstream", *command.format(folder=tmp_path).split()],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1 and time.monotonic() - began < 30, ended.stderr
    assert "owner/none is not in the cache" in ended.stderr.splitlines()[-1] and "Retry" not in ended.stderr
