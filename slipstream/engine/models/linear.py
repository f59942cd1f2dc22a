"""Linear layers whose weights are laid out for passes of few rows, and of which a row does not depend on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import linear, pad

from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.kernels.products import PackedProduct, multiplies

ROWS = 16
"""Rows of a pass that oneDNN lays weights out for: 16 was best for 1 to 16 rows in every shape that was measured."""
LEAST_ROWS = 4
"""With AVX-512 oneDNN's kernels take a third less time for four rows than for one or two."""
_PACKED = {torch.float32, torch.bfloat16}
UNPACKED = frozenset({"linear"})
"""`slipstream.engine.forward.Forward.uneven` where torch computes linear layers."""


class Linear:
    """x [T, in] -> [T, out], out being that of all `parts` side by side. It takes the parts' weights: they have none
    afterwards."""

    def __init__(self, parts: Sequence[torch.nn.Linear], *, keep: bool = False) -> None:
        """`keep` leaves the parts their weights: of embeddings tied to them."""
        weights = [part.weight.detach() for part in parts]
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        if not keep:
            for part in parts:
                del part.weight, part.bias
        self._multiply = lay_out(weights, torch.cat(biases) if biases else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

    @property
    def packed(self) -> PackedProduct | None:
        """The product, if a kernel of ours computes it."""
        return self._multiply if isinstance(self._multiply, PackedProduct) else None


def lay_out(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The products of the weights [out, in], one below the other, by the fastest kernel that this machine has."""
    kernels = find_kernels()
    bytes_ = [quantised_bytes(weight) for weight in weights]
    known = [each for each in bytes_ if each is not None]
    if kernels is not None and len(known) == len(weights):
        rows, scales = (torch.cat(column) for column in zip(*known, strict=True))
        return PackedProduct(kernels, rows, bias, scales, weights[0].dtype)
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    if kernels is not None and multiplies(kernels, weight):
        return PackedProduct(kernels, weight, bias)
    return OneDnn(weight, bias) if packs(weight) else lambda x: linear(x, weight, bias)


def quantised_bytes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """int8 [out, in] and scales [out] of a weight that torchao has quantised symmetrically, a row at a time; None for
    any other."""
    numbers, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(numbers, torch.Tensor) or not isinstance(scales, torch.Tensor) or numbers.dtype is not torch.int8:
        return None
    moved, rescaled = getattr(weight, "zero_point", None), getattr(weight, "act_pre_scale", None)
    steps = getattr(weight, "act_quant_kwargs", None)
    if scales.numel() != numbers.shape[0] or rescaled is not None or steps is not None:
        return None
    if moved is not None and bool(moved.any()):
        return None
    return numbers, scales.flatten()


class OneDnn:
    """By oneDNN's packed kernels, which take a half to a third of the time of `torch.nn.functional.linear` where
    weights do not fit in the caches.

    In fp32 a row's numbers do not depend on the other rows then, but for a lone row, which is added up in another
    order: there are at least LEAST_ROWS. In bf16 the kernels for AMX choose by the number of rows how they split the
    sum: all passes of up to 32 rows agree bit for bit, longer ones may differ from them in the last bit.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._features = weight.shape[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows >= LEAST_ROWS:
            return self._product(x)
        if rows == 0:
            return x.new_empty(0, self._features)
        return self._product(pad(x, (0, 0, 0, LEAST_ROWS - rows)))[:rows]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """True if oneDNN has packed kernels for the weight on this machine."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED or not torch.backends.mkldnn.is_available():
        return False
    native: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native or weight.dtype is torch.float32
