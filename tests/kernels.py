"""The kernels as their source is now, whatever was installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import AVX512, AVX512_BF16, Kernels

OPTIMISED = ("-O3", "-Wall", "-Wextra", "-Werror")
VECTORS = Path(__file__).with_name("wide_vectors.h")
EMULATED = ("-O0", "-Wno-psabi", f'-DWIDE_VECTORS="{VECTORS}"')
EVERY_SET = ("-D__builtin_cpu_supports(x)=1", "-D__builtin_cpu_init()=(void)0")


def compile_kernels(folder: Path) -> Path:
    return _compile(folder / "kernels.so", *OPTIMISED)


def kernels(path: Path, wide: bool, pairs: bool = False) -> Kernels:
    """`path` is what `compile_kernels` made. AVX-512 is emulated on CPUs that have none: slow, and the same code but
    for its operations. `pairs`: bf16 multiplied in pairs, as on CPUs with AVX512-BF16 that are not Intel's."""
    found = Kernels(path, False)
    if not found.level:
        pytest.skip("this CPU has no instructions for it")
    if not wide:
        return found
    name, maker = f"{'pairs' if pairs else 'floats'}.so", f"-D__builtin_cpu_is(x)={int(not pairs)}"  # is it Intel's?
    level = AVX512_BF16 if pairs else AVX512
    found = Kernels(_once(path.with_name(name), *OPTIMISED, maker), True)
    if found.level != level:
        found = Kernels(_once(path.with_name(f"emulated_{name}"), *EMULATED, *EVERY_SET, maker), True)
    assert found.level == level and found.width == 32
    return found


def _once(path: Path, *options: str) -> Path:
    return path if path.exists() else _compile(path, *options)


def _compile(path: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(compiled.__file__).with_name("kernels.c")
    fixed = ("-ffp-contract=off", "-fPIC", "-shared")
    subprocess.run([compiler, *fixed, *options, str(source), "-o", str(path)], check=True)
    return path
