"""`python -m tools.lock > docker/constraints.txt`: the versions that images are built of, those installed here.

What the roles need, and what that needs in turn, by pyproject.toml and the packages' own metadata.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
EXTRAS = ("gateway", "drafter", "verifier", "quantised")
HEAD = "# What images are built of: the versions that were tested. Made by `python -m tools.lock`."


def wanted(project: Path = PROJECT) -> list[Requirement]:
    """Requirements of the roles in pyproject.toml."""
    declared = tomllib.loads(project.read_text("utf-8"))["project"]
    found, extras, seen = [Requirement(line) for line in declared["dependencies"]], list(EXTRAS), set[str]()
    while extras:
        if (name := extras.pop()) in seen:
            continue
        seen.add(name)
        for requirement in map(Requirement, declared["optional-dependencies"][name]):
            if requirement.name == declared["name"]:  # one extra names another
                extras += requirement.extras
            else:
                found.append(requirement)
    return found


def closure(requirements: Iterable[Requirement]) -> dict[str, Version]:
    """By name, what is installed of these and of all that they need."""
    found: dict[str, Version] = {}
    asked: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) not in asked:
            asked.add((name, extras))
            found[name] = Version(distribution(name).version)
            waiting += needs(name, extras)
    return found


def needs(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """On this platform."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield requirement


if __name__ == "__main__":
    pins = [f"{name}=={version.public}" for name, version in sorted(closure(wanted()).items())]
    print("\n".join([HEAD, *pins]))
