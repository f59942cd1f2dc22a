"""The kernels as their source is now, whatever was installed: compiled once for all processes that test it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import AVX512, AVX512_BF16, Kernels

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "kernels"
OPTIMISED = ("-O3", "-Wall", "-Wextra", "-Werror")
VECTORS = Path(__file__).with_name("wide_vectors.h")
EMULATED = ("-O0", "-Wno-psabi", f'-DWIDE_VECTORS="{VECTORS}"')
EVERY_SET = ("-D__builtin_cpu_supports(x)=1", "-D__builtin_cpu_init()=(void)0")


@functools.cache
def folder_of_kernels() -> Path:
    """Named after all that decides what is compiled."""
    source = Path(compiled.__file__).parent
    files = [*sorted(source.glob("*.[ch]")), VECTORS, Path(__file__)]
    version = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    digest = hashlib.blake2b(version, digest_size=12)
    for file in files:
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    folder = CACHE / digest.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_kernels() -> Path:
    return _once(folder_of_kernels() / "kernels.so", *OPTIMISED)


def kernels(path: Path, wide: bool, pairs: bool = False) -> Kernels:
    """`path` is what `compile_kernels` returned. AVX-512 is emulated on CPUs that have none: slow, and the same code
    but for its operations. `pairs`: bf16 multiplied in pairs, as on CPUs with AVX512-BF16 that are not Intel's."""
    found = Kernels(path, False)
    if not found.level:
        pytest.skip("this CPU has no instructions for it")
    if not wide:
        return found
    name, maker = f"{'pairs' if pairs else 'floats'}.so", f"-D__builtin_cpu_is(x)={int(not pairs)}"  # is it Intel's?
    level = AVX512_BF16 if pairs else AVX512
    found = Kernels(path, True)
    if found.level == AVX512_BF16 and not pairs:  # which has the other's instructions too
        found.level, found.multiplies_pairs = AVX512, False
    if found.level != level:
        found = Kernels(_once(path.with_name(name), *OPTIMISED, maker), True)
    if found.level != level:
        found = Kernels(_once(path.with_name(f"emulated_{name}"), *EMULATED, *EVERY_SET, maker), True)
    assert found.level == level and found.width == 32
    return found


def _once(path: Path, *options: str) -> Path:
    """Compiled by the first process that asks; the others wait for it."""
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        return path if path.exists() else _compile(path, *options)


def _compile(path: Path, *options: str) -> Path:
    source = Path(compiled.__file__).with_name("kernels.c")
    fixed = ("-ffp-contract=off", "-fPIC", "-shared")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # a process that ends early leaves no half of a file
        made = Path(folder) / path.name
        subprocess.run([_compiler(), *fixed, *options, str(source), "-o", str(made)], check=True)
        os.replace(made, path)
    return path


def _compiler() -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    return compiler
