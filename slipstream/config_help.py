"""Descriptions of the settings, read from the dataclasses that `config` fills: `--help` of a role, and
docs/settings.md."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

HELP = ("--help", "-h")
WIDTH = 100


class Setting(NamedTuple):
    variable: str
    default: str
    """In Markdown; `must be set` where there is none."""
    meaning: str
    """The string below the field, on one line."""


def settings(prefix: str, kind: Any) -> list[Setting]:
    """The settings of a dataclass that is read from variables with the prefix."""
    meaning = dict(_docstrings(kind))
    return [
        Setting(prefix + field.name.upper(), _default(field), meaning.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]


def helped(summary: str, prefix: str, kind: Any) -> bool:
    """Whether the command line asks for help; it is printed then: the summary, and each variable with its meaning."""
    if not any(word in HELP for word in sys.argv[1:]):
        return False
    print(f"{summary}\n")
    for setting in settings(prefix, kind):
        print(f"{setting.variable} ({setting.default.replace('`', '')})")
        print(textwrap.fill(setting.meaning.replace("`", ""), WIDTH, initial_indent="    ", subsequent_indent="    "))
    return True


def _docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Fields of a class with the string below each, on one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                yield name, " ".join(meaning.split())


def _default(field: dataclasses.Field[Any]) -> str:
    match field.default:
        case dataclasses.MISSING:
            return "must be set"
        case None:
            return "unset"
        case "" | ():
            return "empty"
        case float() as number:
            return f"`{number:g}`"
        case other:
            return f"`{other}`".lower()
