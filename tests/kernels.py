"""The kernels as their source is now, whatever was installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import Kernels


def compile_kernels(folder: Path) -> Path:
    source = Path(compiled.__file__).with_name("kernels.c")
    return _compile(source, folder / "kernels.so", "-O3", "-Wall", "-Wextra", "-Werror")


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
    path, sources = folder / "emulated.so", folder / "emulated"
    if not path.exists():
        sources.mkdir()
        for each in Path(compiled.__file__).parent.glob("*.[ch]"):
            shutil.copy(each, sources)
        shutil.copy(Path(__file__).with_name("wide_vectors.h"), sources / "avx512.h")
        pretended = ("-D__builtin_cpu_supports(x)=1", "-D__builtin_cpu_init()=(void)0")
        _compile(sources / "kernels.c", path, "-O0", "-Wno-psabi", *pretended)
    return path


def _compile(source: Path, path: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    fixed = ("-ffp-contract=off", "-fPIC", "-shared")
    subprocess.run([compiler, *fixed, *options, str(source), "-o", str(path)], check=True)
    return path
