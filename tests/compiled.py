"""Fails unless every module that setup.py compiles is the compiled one: `make test-compiled` runs it in its copy."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

SETUP = Path(__file__).parents[1] / "setup.py"


def main() -> None:
    modules = re.findall(r'^    "(.*)\.py",$', SETUP.read_text(), re.MULTILINE)
    assert modules
    for module in modules:
        file = import_module(module.replace("/", ".")).__file__ or ""
        assert file.endswith(".so") and str(SETUP.parent) in file, f"{module} is {file}"
        print(f"compiled: {module}")


if __name__ == "__main__":
    main()
