"""Every command of the README and of docs/ is one that there is: subcommands, options, modules and targets. Those that
ask a running system run to their end in tests/e2e/test_document_commands.py."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from slipstream.cli.commands import app

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_SLIPSTREAM = re.compile(r"^\s*(?:[A-Z_]+=\S+ )*(slipstream [a-z].*)$", re.MULTILINE)
_MODULE = re.compile(r"python -m ([a-z_][\w.]*)")
_TARGET = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)
_ELSEWHERE = {"pytest", "build"}


def shell(document: Path) -> str:
    """The commands of a document, each on one line, without comments, pipes and redirections."""
    text = "\n".join(re.findall(r"```sh\n(.*?)```", document.read_text("utf-8"), re.DOTALL))
    return re.sub(r"(?m)\s+(?:#|\||>|&).*$", "", text.replace("\\\n", " "))


SLIPSTREAM = [each for document in DOCUMENTS for each in _SLIPSTREAM.findall(shell(document))]


@pytest.mark.parametrize("command", sorted(set(SLIPSTREAM)))
def test_options_of_a_command_are_options_of_the_command_line(command: str) -> None:
    words = shlex.split(command)[1:]
    found: click.Command = typer.main.get_command(app)
    context = click.Context(found)
    while isinstance(found, click.Group):
        name, found, words = found.resolve_command(context, words)
        assert found is not None
        context = click.Context(found, parent=context, info_name=name)
    parsed = found.make_parser(context)
    parsed.parse_args(list(words))  # raises for an option that there is not


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each.name)
def test_modules_and_targets_are_there(document: Path) -> None:
    text = document.read_text("utf-8")
    for name in set(_MODULE.findall(text)) - _ELSEWHERE:
        assert importlib.util.find_spec(name) is not None, name
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(_TARGET.findall(text)) <= targets


def test_commands_are_found() -> None:
    assert len(set(SLIPSTREAM)) > 25
