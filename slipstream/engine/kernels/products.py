"""Products of few rows with weights that do not fit in the caches, by the kernels of tile.h."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch.nn.functional import pad

from slipstream.engine.kernels import compiled
from slipstream.engine.kernels.compiled import AVX512, BYTES, KINDS, Kernels

HUGE_PAGE = 2 << 20
"""Bytes."""
ROWS_AT_ONCE = 1024
"""Rows of a weight that are looked at together: most weights that are no bf16 numbers show it in the first."""


GROUP_LINES = 32
"""Steps whose weights share a table of exponents; as in squeeze.h."""
MOST_RAW = 0.25
"""Most groups that may have more exponents than a table: above it nothing is won."""


class _Product(ctypes.Structure):
    """`struct product`."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("features", ctypes.c_long),
        ("depth", ctypes.c_long),
        ("kind", ctypes.c_long),
        ("result", ctypes.c_long),
        ("level", ctypes.c_long),
        ("floats", ctypes.c_long),
        ("squeezed", ctypes.c_long),
    )


def multiplies(kernels: Kernels | None, weight: torch.Tensor) -> bool:
    """True if there is a kernel for weights like these [out, in]."""
    if kernels is None or weight.device.type != "cpu" or weight.dtype not in KINDS or weight.numel() == 0:
        return False
    return weight.dtype is torch.float32 or weight.shape[-1] % 2 == 0


def holds_in_half(weight: torch.Tensor) -> bool:
    """True for fp32 weights [out, in] that are bf16 numbers, as those of a bf16 checkpoint are: read at half the bytes,
    multiplied as the fp32 numbers that they are and added up in the same order, they give the same bits."""
    if weight.dtype is not torch.float32 or weight.shape[-1] % 2:
        return False
    return all(torch.equal(some.bfloat16().float(), some) for some in weight.split(ROWS_AT_ONCE))


def in_huge_pages(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that is read from end to end in every pass: in pages as large as the system gives on request
    (Linux's `madvise`), because looking up small ones takes 2 to 3 % of it."""
    if source.nbytes < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return source.contiguous()
    memory = mmap.mmap(-1, source.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=source.dtype).view(source.shape).copy_(source)


def squeeze(kernels: Kernels, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """bf16 weights [blocks, steps, features, 2] in 12 bits as squeeze.h has them, and the groups that need all 16. None
    where too many do, or where few steps have to pay for a table."""
    lines = lines.contiguous()
    blocks, steps, *pairs = lines.shape
    most = int(MOST_RAW * blocks * -(-steps // GROUP_LINES))
    raw = torch.empty(most, GROUP_LINES, *pairs, dtype=lines.dtype)  # pages that are never written to take no memory
    if blocks * kernels.squeezed_bytes(steps) >= lines.nbytes:
        return None
    squeezed = in_huge_pages(torch.empty(blocks, kernels.squeezed_bytes(steps), dtype=torch.uint8))
    found = kernels.squeeze(lines.data_ptr(), blocks, steps, squeezed.data_ptr(), raw.data_ptr(), most)
    return (squeezed, raw) if found <= most else None


class PackedProduct:
    """x [T, in] -> [T, out]. A row has the same bits in every product."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weight [out, in] for which there is a kernel; it is copied. Weights in int8 have `scales` [out], and `dtype`
        is that of rows and results, else it is that of the weights."""
        self.features, depth = weight.shape
        narrow, self.depth, self._dtype = scales is not None, depth, dtype or weight.dtype
        halved = holds_in_half(weight)
        weight = weight.bfloat16() if halved else weight
        pair = 2 if weight.dtype is torch.bfloat16 else 1
        self._floats = narrow or halved or (pair == 2 and not kernels.multiplies_pairs)
        blocks = -(-self.features // kernels.width)
        filled = pad(weight, (0, 0, 0, blocks * kernels.width - self.features))
        lines = filled.reshape(blocks, kernels.width, -1, pair).transpose(1, 2)
        squeezed = squeeze(kernels, lines) if pair == 2 and not self._floats else None
        self._raw: torch.Tensor | None = None
        if squeezed is None:
            self._weights = in_huge_pages(lines)
        else:
            self._weights, self._raw = squeezed
        self._bias, self._scales = (None if each is None else each.float().contiguous() for each in (bias, scales))
        self._struct = _Product(
            self._weights.data_ptr(),
            *(None if each is None else each.data_ptr() for each in (self._bias, self._scales)),
            self.features,
            depth // pair,
            BYTES if narrow else KINDS[weight.dtype],
            KINDS[self._dtype],
            min(kernels.level, AVX512) if self._floats else kernels.level,
            int(self._floats),
            int(squeezed is not None),
        )
        self.address = ctypes.addressof(self._struct)
        """Where its `struct product` stands."""
        self._multiply, self._threads = kernels.multiply, kernels.threads

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that a pass reads, but for groups that did not fit into twelve bits."""
        return self._weights.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for rows of another width, dtype or device: the kernel would read what is not theirs."""
        rows, depth = x.shape
        if depth != self.depth or x.dtype is not self._dtype or not x.is_cpu:
            raise ValueError(
                f"rows have {depth} numbers of {x.dtype} on {x.device}, the weights {self.depth} of {self._dtype}."
            )
        out = x.new_empty((rows, self.features))
        x = (x.float() if self._floats else x).contiguous()
        threads = torch.get_num_threads()
        self._multiply(self.address, x.data_ptr(), out.data_ptr(), rows, compiled.FEW, threads, self._threads)
        return out
