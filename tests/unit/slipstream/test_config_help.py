"""`--help` of a role prints every variable that it reads, with its default and what it means."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

import drafter_svc.config
import gateway.config
import verifier_svc.config
from slipstream.config_help import helped

ROLES = (
    (gateway.config.PREFIX, gateway.config.GatewayConfig),
    (verifier_svc.config.PREFIX, verifier_svc.config.VerifierConfig),
    (drafter_svc.config.PREFIX, drafter_svc.config.DrafterConfig),
)


@pytest.mark.parametrize(("prefix", "kind"), ROLES, ids=[prefix for prefix, _ in ROLES])
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_setting(
    prefix: str, kind: Any, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["role", word])
    assert helped("a role. It reads:", prefix, kind)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a role. It reads:"
    assert [line.partition(" ")[0] for line in lines if line.startswith(prefix)] == [
        prefix + field.name.upper() for field in dataclasses.fields(kind)
    ]
    assert max(map(len, lines)) <= 100 and "`" not in "".join(lines)


def test_help_is_printed_only_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["role", "--check"])
    assert not helped("a role. It reads:", *ROLES[0]) and not capsys.readouterr().out
