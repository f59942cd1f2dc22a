"""What the `slipstream` command refuses before it asks anybody, and what it says of itself."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

from capacity.__main__ import plan
from slipstream.cli import options
from slipstream.cli.commands import app
from slipstream.serving.fleet import Fleet

REFUSED = {
    "plain decoding with a drafter": (["serve", "--drafter", "none", "--drafter", "model"], "none"),
    "an unknown drafter": (["serve", "--drafter", "oracle"], "oracle"),
    "log-probabilities that nobody would see": (["generate", "x", "--logprobs", "2"], "--json"),
    "a negative seed": (["generate", "x", "--seed", "-1"], "--seed"),
    "half the prices": (["compare", "--drafter-price", "0.4"], "--verifier-price"),
    "no output": (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_option_is_refused_by_its_name(name: str) -> None:
    command, told = REFUSED[name]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.parametrize("command", [["serve"], ["train"], ["inflate", "a", "b"], ["plan", "a.toml"]])
def test_a_command_that_needs_more_than_the_client_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")  # `train` starts itself again to set it
    monkeypatch.setattr(options, "find_spec", lambda module: None)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "slipstream-serve[gateway,drafter,verifier]" in result.output and "NOT_INSTALLED" in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    asked = {
        "bash": {"COMP_WORDS": "slipstream ro", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "slipstream ro"},
        "fish": {"_TYPER_COMPLETE_ARGS": "slipstream ro", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    variables = asked[shell] | {"_SLIPSTREAM_COMPLETE": f"complete_{shell}"}
    result = CliRunner().invoke(app, [], env=variables, prog_name="slipstream")
    assert "rollback" in result.output and "generate" not in result.output


def test_the_command_prints_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, metadata.version("slipstream-serve"))


def test_every_command_can_print_json() -> None:
    passed_on = typer.Typer()  # `slipstream plan` passes its arguments on to this one
    passed_on.command("plan")(plan)
    passed_on.callback()(lambda: None)
    commands = {**get_group(app).commands, **get_group(passed_on).commands}
    assert len(commands) == 16
    lacking = [name for name, each in commands.items() if not any("--json" in one.opts for one in each.params)]
    assert lacking == []


def test_serving_is_announced_for_a_person_and_for_a_program() -> None:
    fleet = Fleet("target", {"ngram": ""}, "auto", 1)
    assert fleet.announcement("h:1", as_json=False) == "ready grpc=h:1 http=off"
    fleet.verifier.metrics, fleet.drafters["ngram"].metrics = "h:2", "h:3"
    assert fleet.announcement("h:1", as_json=False) == "ready grpc=h:1 http=off metrics=verifier=h:2,ngram=h:3"
    told = json.loads(fleet.announcement("h:1", as_json=True))
    assert told == {"grpc": "h:1", "http": None, "metrics": {"verifier": "h:2", "ngram": "h:3"}}
