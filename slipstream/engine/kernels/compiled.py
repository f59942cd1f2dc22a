"""The kernels of kernels.c. `pip install` compiles them where there is a C compiler.

They share the threads of torch: two pools on the same cores would wait for each other.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

VERSION = 13
"""Version of the calls in kernels.c: a file compiled from another one is not used."""
KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The kernels' names of what a pass computes with; weights may be BYTES."""
BYTES = 2
AVX512, AVX512_BF16 = 2, 3
"""The highest levels of kernels.c."""
FEW = 1 << 18
"""Multiplications that one thread has done before others have woken up."""


class Kernels:
    """The compiled file at `path`; AVX-512 only if `wide`. Raises OSError or AttributeError for a file that is none."""

    def __init__(self, path: Path, wide: bool) -> None:
        library = ctypes.CDLL(str(path))
        self.path = path
        if library.slipstream_version() != VERSION:
            raise OSError(f"{path} is of another version, or for another CPU")
        library.slipstream_level.restype = library.slipstream_width.restype = ctypes.c_long
        self.level: int = library.slipstream_level(int(wide))
        """Which instructions are used; 0 where none of them are there."""
        self.width: int = library.slipstream_width(ctypes.c_long(self.level))
        """Output features side by side."""
        self.multiplies_pairs = self.level == AVX512_BF16
        """False if rows must be floats where weights are bf16."""
        self.squeeze, self.squeezed_bytes = library.slipstream_squeeze, library.slipstream_squeezed_bytes
        self.multiply = library.slipstream_multiply
        pointer = ctypes.c_void_p
        self.multiply.argtypes = (pointer, pointer, pointer, ctypes.c_long, ctypes.c_long, ctypes.c_uint, pointer)
        self.multiply.restype = None
        self.squeeze.argtypes = (pointer, ctypes.c_long, ctypes.c_long, pointer, pointer, ctypes.c_long)
        self.squeeze.restype = self.squeezed_bytes.restype = ctypes.c_long
        self.squeezed_bytes.argtypes = (ctypes.c_long,)
        self.rms_norm = library.slipstream_rms_norm
        sizes = (ctypes.c_long, ctypes.c_long, ctypes.c_float, ctypes.c_long)
        self.rms_norm.argtypes = (pointer, pointer, pointer, *sizes)
        self.rms_norm.restype = None
        self.attend = library.slipstream_attend
        counts = (ctypes.c_long, pointer, ctypes.c_long, ctypes.c_long, ctypes.c_uint)
        self.attend.argtypes = (pointer, pointer, pointer, *counts, pointer)
        self.attend.restype = None
        long = ctypes.c_long
        self.activate = library.slipstream_activate
        self.activate.argtypes = (long, pointer, pointer, long, long, long, ctypes.c_uint, pointer)
        self.decode, self.rank = library.slipstream_decode, library.slipstream_rank
        self.decode.argtypes = (pointer,)
        self.activate.restype = self.decode.restype = None
        self.rank.argtypes = (pointer, long, long, long, ctypes.c_float, pointer, pointer)
        self.rank.restype = None
        self.contend = library.slipstream_contend
        self.contend.argtypes = (pointer, long, long, pointer, pointer, pointer, pointer, long)
        self.contend.restype = long
        self.threads = ctypes.cast(_openmp().GOMP_parallel, pointer)


def _openmp() -> ctypes.CDLL:
    """The OpenMP that torch computes with: it brings its own."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return ctypes.CDLL(str(own[0]) if own else "libgomp.so.1")


@cache
def find_kernels() -> Kernels | None:
    """None where nothing was compiled, and on CPUs without AVX2."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return None
    files = [Path(__file__).with_name(f"_kernels{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    for path in files:
        if path.exists():
            try:
                found = Kernels(path, capability == "AVX512")
            except (OSError, AttributeError) as error:
                log.warning("compiled kernels are left out: %s", error)
                return None
            return found if found.level else None
    log.info("no compiled kernels: a pass takes up to twice as long on a CPU; install where there is a C compiler")
    return None
