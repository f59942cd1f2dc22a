"""What stands in for CUDA where there is none: a kernel in plain torch, and a recorder that repeats operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.engine.cuda_graphs.flex import Call

WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
WAITS |= {"nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique2"}
"""Operations whose result's value or shape the host has to wait for."""


def listed_attention(call: Call) -> tuple[Tensor, Tensor | None]:
    """Reads only the blocks that are listed, and one that is listed twice twice: as a kernel does, and unlike
    FlexAttention's own definition, which looks at the mask alone."""
    mask, size = call.mask, call.mask.BLOCK_SIZE[1]
    chunks, heads, rows, _ = call.query.shape
    places = torch.arange(mask.kv_indices.shape[-1], device=call.query.device) < mask.kv_num_blocks.view(chunks, 1)
    blocks = mask.kv_indices.view(chunks, -1)
    times = torch.zeros(chunks, call.key.shape[2] // size, device=call.query.device)
    times.scatter_add_(1, blocks.long(), places.to(times.dtype))
    b, h, m, n = (
        torch.arange(length, dtype=torch.int32, device=call.query.device)
        for length in (chunks, heads, rows, call.key.shape[2])
    )
    sees = mask.mask_mod(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), m.view(-1, 1), n)
    counted = (times.repeat_interleave(size, dim=1).view(chunks, 1, 1, -1) * sees).log()
    scores = (call.query.float() @ call.key.float().transpose(2, 3)) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = torch.where(counted.isneginf(), counted, scores + counted)
    blind = counted.isneginf().all(dim=3, keepdim=True)
    weights = scores.softmax(dim=3).masked_fill(blind, 0.0)
    log_sums = scores.logsumexp(dim=3) if call.log_sums else None
    return (weights.to(call.value.dtype) @ call.value).to(call.query.dtype), log_sums


class TapeRecorder:
    """What a captured graph does, on a CPU: operations are noted while the body runs once, and repeated on the very
    tensors they worked on. Python does not run again, so what it read from a step stays what it was."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        body()
        tape = _Tape()
        with tape:
            body()
        self.captures += 1
        return tape.repeat


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def repeat(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            inputs = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if _memory(old) not in inputs:  # else it is a view, or was written in place
                    old.copy_(new)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # packed weights have no readable storage
        return id(tensor)
