"""The kernels as their source is now, whatever was installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import Kernels


def compile_kernels(folder: Path) -> Path:
    return _compile(folder / "kernels.so", "-O3", "-Wall", "-Wextra", "-Werror")


def kernels(path: Path, wide: bool) -> Kernels:
    """AVX-512 is emulated on CPUs that have none: slow, and the same code but for its operations."""
    found = Kernels(path, wide)
    if not found.level:
        pytest.skip("this CPU has no instructions for it")
    if wide and found.level == Kernels(path, False).level:
        found = Kernels(_emulated(path.parent), True)
        assert found.width == 32
    return found


def _emulated(folder: Path) -> Path:
    path, vectors = folder / "emulated.so", Path(__file__).with_name("wide_vectors.h")
    pretended = ("-D__builtin_cpu_supports(x)=1", "-D__builtin_cpu_init()=(void)0")
    return path if path.exists() else _compile(path, "-O0", "-Wno-psabi", f'-DWIDE_VECTORS="{vectors}"', *pretended)


def _compile(path: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(compiled.__file__).with_name("kernels.c")
    fixed = ("-ffp-contract=off", "-fPIC", "-shared")
    subprocess.run([compiler, *fixed, *options, str(source), "-o", str(path)], check=True)
    return path
