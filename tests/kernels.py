"""The kernels as their source is now, whatever was installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import Kernels


def compile_kernels(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, path = Path(compiled.__file__).with_name("kernels.c"), folder / "kernels.so"
    options = ("-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
    subprocess.run([compiler, *options, str(source), "-o", str(path)], check=True)
    return path


def kernels(path: Path, wide: bool) -> Kernels:
    found = Kernels(path, wide)
    if not found.level or (wide and found.level == Kernels(path, False).level):
        pytest.skip("this CPU has no instructions for it")
    return found
