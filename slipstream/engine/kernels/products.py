"""Products of few rows with weights that do not fit in the caches, and the compiled file that has all kernels.

`pip install` compiles them where there is a C compiler. They share the threads of torch: two pools on the same cores
would wait for each other.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import pad

log = logging.getLogger(__name__)

VERSION = 3
"""Version of the calls in kernels.c: a file compiled from another one is not used."""
KINDS = {torch.float32: 0, torch.bfloat16: 1}
FEW = 1 << 18
"""Multiplications that one thread has done before others have woken up."""


class _Product(ctypes.Structure):
    """`struct product`."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("features", ctypes.c_long),
        ("depth", ctypes.c_long),
        ("kind", ctypes.c_long),
        ("level", ctypes.c_long),
    )


class Kernels:
    """The compiled file at `path`; AVX-512 only if `wide`. Raises OSError or AttributeError for a file that is none."""

    def __init__(self, path: Path, wide: bool) -> None:
        library = ctypes.CDLL(str(path))
        if library.slipstream_version() != VERSION:
            raise OSError(f"{path} is of another version, or for another CPU")
        library.slipstream_level.restype = library.slipstream_width.restype = ctypes.c_long
        self.level: int = library.slipstream_level(int(wide))
        """Which instructions are used; 0 where none of them are there."""
        self.width: int = library.slipstream_width(ctypes.c_long(self.level))
        """Output features side by side."""
        self.multiply = library.slipstream_multiply
        pointer = ctypes.c_void_p
        self.multiply.argtypes = (pointer, pointer, pointer, ctypes.c_long, ctypes.c_uint, pointer)
        self.multiply.restype = None
        self.rms_norm = library.slipstream_rms_norm
        sizes = (ctypes.c_long, ctypes.c_long, ctypes.c_float, ctypes.c_long)
        self.rms_norm.argtypes = (pointer, pointer, pointer, *sizes)
        self.rms_norm.restype = None
        self.attend = library.slipstream_attend
        counts = (ctypes.c_long, pointer, ctypes.c_long, ctypes.c_uint)
        self.attend.argtypes = (pointer, pointer, pointer, *counts, pointer)
        self.attend.restype = None
        self.decode = library.slipstream_decode
        self.decode.argtypes, self.decode.restype = (pointer,), None
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


def multiplies(kernels: Kernels | None, weight: torch.Tensor) -> bool:
    """True if there is a kernel for weights like these [out, in]."""
    if kernels is None or weight.device.type != "cpu" or weight.dtype not in KINDS or weight.numel() == 0:
        return False
    return weight.dtype is torch.float32 or weight.shape[-1] % 2 == 0


class PackedProduct:
    """x [T, in] -> [T, out], in the dtype of the weights. A row has the same bits in every product."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out, in] for which there is a kernel; it is copied."""
        self.features, depth = weight.shape
        self.depth, self._dtype = depth, weight.dtype
        pair = 2 if weight.dtype is torch.bfloat16 else 1
        blocks = -(-self.features // kernels.width)
        filled = pad(weight, (0, 0, 0, blocks * kernels.width - self.features))
        self._weights = filled.reshape(blocks, kernels.width, -1, pair).transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._struct = _Product(
            self._weights.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.features,
            depth // pair,
            KINDS[weight.dtype],
            kernels.level,
        )
        self.address = ctypes.addressof(self._struct)
        """Of its `struct product`."""
        self._multiply, self._threads = kernels.multiply, kernels.threads
        self._shared_from = FEW / (self.features * depth)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for rows of another width, dtype or device: the kernel would read what is not theirs."""
        rows, depth = x.shape
        if depth != self.depth or x.dtype is not self._dtype or not x.is_cpu:
            raise ValueError(
                f"rows have {depth} numbers of {x.dtype} on {x.device}, the weights {self.depth} of {self._dtype}."
            )
        x = x.contiguous()
        out = x.new_empty((rows, self.features))
        threads = torch.get_num_threads() if rows > self._shared_from else 1
        self._multiply(self.address, x.data_ptr(), out.data_ptr(), rows, threads, self._threads)
        return out
