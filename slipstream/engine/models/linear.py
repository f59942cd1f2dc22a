"""Linear layers: several of the library's joined into one, and packed once for the CPU's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

ROWS = 16
"""Of a pass for which weights are laid out. It was best for 1 to 16 rows alike in every shape that was measured."""
_PACKED = {torch.float32, torch.bfloat16}


class Linear:
    """x [T, in] -> [T, out], out being that of all `parts` side by side.

    It takes the parts' weights: they have none afterwards. On a CPU they are packed as oneDNN wants them, which takes a
    half to a third of the time of `torch.nn.functional.linear` where weights do not fit in the caches. A row's numbers
    do not depend on the other rows then, but for a lone row, which the kernels add up in another order: it is computed
    twice instead, at the same price.
    """

    def __init__(self, parts: Sequence[torch.nn.Linear], *, keep: bool = False) -> None:
        """`keep` leaves the parts their weights: of embeddings tied to them."""
        weight = parts[0].weight.detach() if len(parts) == 1 else torch.cat([part.weight.detach() for part in parts])
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        if not keep:
            for part in parts:
                del part.weight, part.bias
        self.features = weight.shape[0]
        self._packed = packs(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return linear(x, self._weight, self._bias)
        rows = x.shape[0]
        if rows == 1:
            return self._multiply(x.expand(2, -1))[:1]
        return self._multiply(x) if rows else x.new_empty(0, self.features)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """Whether this torch on this machine has packed kernels for the weight."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED or not torch.backends.mkldnn.is_available():
        return False
    native: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native or weight.dtype is torch.float32
