"""The versions that images are built of, those installed here:

    python -m tools.lock > docker/constraints.txt              # all images
    python -m tools.lock cuda > docker/constraints-cu130.txt   # CUDA's libraries, for images with GPUs

Requirements of the roles by pyproject.toml, and what those require in turn by the packages' own metadata. The second
list can be made only where torch is a CUDA build, as PyPI's is for Linux; the first is the same beside either build.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
EXTRAS = ("gateway", "lookup", "drafter", "verifier", "quantised", "gguf")
HEADS = {
    "": "# What images are built of: the versions that were tested. Made by `python -m tools.lock`.",
    "cuda": "# CUDA's libraries in images with GPUs, beside constraints.txt. Made by `python -m tools.lock cuda`.",
}
CUDA = ("cuda-", "nvidia-", "triton")
"""Beginnings of names that only torch's CUDA builds require."""


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


def for_cuda(name: str) -> bool:
    """True for a package that torch requires in its CUDA builds alone. `name` is canonical."""
    return name.startswith(CUDA)


def lines(kind: str) -> list[str]:
    """The file of this kind: `cuda`, or empty for what every image has. Raises SystemExit where torch here is built
    without CUDA and its libraries are wanted."""
    installed = closure(wanted())
    pins = [f"{name}=={each.public}" for name, each in sorted(installed.items()) if for_cuda(name) is (kind == "cuda")]
    if not pins:
        raise SystemExit("torch is built without CUDA here; run this where PyPI's build is installed.")
    return [HEADS[kind], *pins]


def needs(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """On this platform."""
    for line in distribution(name).requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield requirement


if __name__ == "__main__":
    print("\n".join(lines("".join(sys.argv[1:]))))
