"""Configuration: a frozen dataclass for each service, read from the environment in this one place.

A field `listen: str` of a class read with prefix `DRAFTER_` comes from `DRAFTER_LISTEN`. A value that cannot be read
raises with its name and value; a variable with the prefix that names no field is an error too, so that a slip in a
manifest never goes unnoticed.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slipstream.errors import InvalidArgument

Config = TypeVar("Config")


def from_env(kind: type[Config], prefix: str, environ: Mapping[str, str] | None = None) -> Config:
    """Read `kind`, a frozen dataclass, from the variables that start with `prefix`.

    Raises InvalidArgument for an unknown variable, a missing required one and a value that cannot be read.
    """
    given = os.environ if environ is None else environ
    fields = {prefix + field.name.upper(): field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(name for name in given if name.startswith(prefix) and name not in fields):
        raise InvalidArgument(f"{', '.join(unknown)}: no such setting; known are {', '.join(sorted(fields))}.")
    types = typing.get_type_hints(kind)
    values = {
        field.name: _read(name, given[name], types[field.name]) for name, field in fields.items() if name in given
    }
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise InvalidArgument(f"{name} is not set and has no default.")
    return kind(**values)


def _read(name: str, text: str, wanted: Any) -> Any:
    try:
        return _READERS[wanted](text.strip())
    except (ValueError, KeyError) as error:
        raise InvalidArgument(f"{name}={text!r} cannot be read as {wanted}.") from error


def boolean(name: str, text: str) -> bool:
    """A truth value of a variable that belongs to no config. Raises InvalidArgument for anything else."""
    return bool(_read(name, text, bool))


def _boolean(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def require_positive(config: object, prefix: str, *names: str) -> None:
    """Raises InvalidArgument naming the first field that is set and not above zero: a zero here would hang, not
    serve."""
    for name in names:
        given = getattr(config, name)
        if given is not None and not given > 0:  # nor for what is no number
            raise _refusal(config, prefix, name, "give a number above zero")


def require_not_negative(config: object, prefix: str, *names: str) -> None:
    """Raises InvalidArgument naming the first field that is set and below zero."""
    for name in names:
        given = getattr(config, name)
        if given is not None and not given >= 0:
            raise _refusal(config, prefix, name, "give 0 or more")


def _refusal(config: object, prefix: str, name: str, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"{prefix}{name.upper()}={getattr(config, name)}; {wanted}.")


_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    int | None: int,
    float: float,
    bool: _boolean,
    tuple[str, ...]: _words,
}
