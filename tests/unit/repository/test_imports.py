"""Import cycles: no module of the product is part of one, and the contract of pyproject.toml fails on one."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[3]
LINTER: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CYCLES = next(contract for contract in LINTER["contracts"] if contract["type"] == "acyclic_siblings")
PRODUCT = ("slipstream", "drafter_svc", "verifier_svc", "gateway", "capacity", "measurement", "training")
OWN = ("name", "ancestors", "skip_descendants")
RUN = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def cycles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """Sets of modules that import each other in a circle. Imports under TYPE_CHECKING and in functions count."""
    circles = {
        frozenset({module} | (graph.find_upstream_modules(module) & graph.find_downstream_modules(module)))
        for module in graph.modules
    }
    return {circle for circle in circles if len(circle) > 1}


def test_no_module_is_part_of_a_cycle() -> None:
    found = cycles(grimp.build_graph(*PRODUCT, cache_dir=None))
    assert not [sorted(cycle) for cycle in found]


@pytest.mark.parametrize("chain", [("a", "b"), ("a", "b", "c")], ids=str)
def test_a_circle_of_modules_is_found(chain: tuple[str, ...]) -> None:
    graph = grimp.ImportGraph()
    for module in (*chain, "above", "below"):
        graph.add_module(module)
    for importer, imported in zip(chain, (*chain[1:], chain[0]), strict=True):
        graph.add_import(importer=importer, imported=imported)
    graph.add_import(importer="above", imported="a")
    graph.add_import(importer="a", imported="below")
    assert cycles(graph) == {frozenset(chain)}


def linted(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Lints these files of a package `house` with the project's contract against cycles."""
    settings = [f"{name} = {CYCLES[name]!r}" for name in CYCLES if name not in OWN]
    contract = ["[[tool.importlinter.contracts]]", 'name = "cycles"', 'ancestors = ["house"]', *settings]
    options = [f"{name} = {str(LINTER[name]).lower()}" for name in LINTER if name.startswith("exclude_")]
    config = ["[tool.importlinter]", 'root_packages = ["house"]', *options, *contract]
    (folder / "pyproject.toml").write_text("\n".join(config))
    for name, text in files.items():
        file = folder / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text)
    return subprocess.run([sys.executable, "-c", RUN], cwd=folder, capture_output=True, text=True, check=False)


PLAIN = {"low.py": "", "high.py": "from house import low", "rooms/one.py": "from house import low", "__init__.py": ""}


@pytest.mark.parametrize(
    "more",
    [
        {"low.py": "from house import high"},
        {"low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import high"},
        {"low.py": "def late():\n    from house import high"},
        {"rooms/one.py": "from house.rooms import two", "rooms/two.py": "from house.rooms import one"},
        {"rooms/one.py": "from house import high", "high.py": "from house.rooms import two", "rooms/two.py": ""},
    ],
    ids=["modules", "type checking", "inside a function", "within a package", "between packages"],
)
def test_a_cycle_breaks_the_contract(tmp_path: Path, more: dict[str, str]) -> None:
    whole = linted(tmp_path, PLAIN)
    assert whole.returncode == 0, whole.stdout
    broken = linted(tmp_path, PLAIN | more)
    assert broken.returncode == 1, broken.stdout
    assert "No cycles are allowed" in broken.stdout
