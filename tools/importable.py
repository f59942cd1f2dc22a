"""`python -m tools.importable MODULE [MODULE ...]`: imports each of them, at the end of `make setup` and `setup-vllm`.

An installer reports success for packages that cannot be loaded, such as a torch without the libraries that it links.
Prints what is missing and ends with status 1 where a module cannot be imported.
"""

from __future__ import annotations

import importlib
import logging
import sys


def faults(modules: list[str]) -> list[str]:
    """A line for each module that cannot be imported. Their warnings about what this machine lacks are left out."""
    logging.disable(logging.WARNING)
    found = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package may raise anything
            found.append(f"import {module}: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    if lines := faults(sys.argv[1:]):
        raise SystemExit("\n".join(["The installation is incomplete:", *lines]))
