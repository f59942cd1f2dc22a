"""A GPU on a machine that has none: tensors that claim another device, compute on the CPU, and count.

While a `VirtualGPU` is entered, code that works on its tensors takes the branches that it takes on a GPU. Whoever
brings such a tensor together with one on the CPU gets an error, as on a GPU. Counted are launches, copies to the device
and to the host, the places where the host waits for the device, and the bytes that launches read and write. No time is
measured, and nothing runs beside anything else.

An operator of torch is one launch, fused attention too; on a GPU some of them (`topk`, `sort`, `index_put_` that adds
up) are several. Kernels of our own run in Triton's interpreter; their bytes are those at different addresses that each
program loads and stores. The device's name is `meta`, which any build of torch knows; unlike its own tensors these have
numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from slipstream.engine.kernels.triton_launch import launch

DEVICE = torch.device("meta")
_SHAPED_BY_VALUES = {"nonzero", "masked_select", "unique_dim", "_unique2"}
_READ = {"_local_scalar_dense", "equal"}
"""Operators whose result the host reads."""
_INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}
_PARTLY = _INDEXED | {"index_select", "gather", "embedding", "scatter_", "scatter_reduce_", "index_add_", "index_copy_"}
"""They touch as much of their first tensor as they return or are given."""
_COPIES = {"_to_copy", "copy_"}
_FREE = {"_unsafe_view", "_reshape_alias", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
"""They only describe or reserve memory."""
_WHOLE = {"scaled_dot_product_attention", "rms_norm"}
"""Operators that a GPU has a kernel for, whatever they are made of elsewhere."""

_PINNED = "_virtually_pinned"


@dataclass(slots=True)
class Work:
    """What a device was given to do."""

    launches: Counter[str] = field(default_factory=Counter)
    """By operator."""
    to_device: int = 0
    """Copies."""
    bytes_to_device: int = 0
    """Copied."""
    to_host: int = 0
    """Copies, single values too."""
    waits: Counter[str] = field(default_factory=Counter)
    """Where the host waits until the device has done all that it was given: by why. Every copy to the host is one, and
    every copy to the device from memory that is not pinned."""
    bytes: int = 0
    """Read and written by launches."""


class Remote(Tensor):
    """A tensor on the device; of use only while its `VirtualGPU` is entered."""

    own: Tensor

    @staticmethod
    def __new__(cls, own: Tensor) -> Remote:
        remote: Remote = Tensor._make_wrapper_subclass(
            cls, own.shape, own.stride(), own.storage_offset(), dtype=own.dtype, device=DEVICE
        )
        remote.own = own
        return remote

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} after its device was left")


class VirtualGPU(TorchDispatchMode):
    """While it is entered, `device="meta"` is this device. `work` counts; give it a new `Work` to count afresh."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()
        self._python = _Python(self)

    def __enter__(self) -> VirtualGPU:
        self._python.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._python.__exit__(*error)  # type: ignore[no-untyped-call]

    def take(self) -> Work:
        """What was counted since the last call."""
        done, self.work = self.work, Work()
        return done

    def move(self, model: torch.nn.Module) -> None:
        """The model's weights and buffers go there; weights that are one stay one."""
        moved: dict[int, torch.nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in moved:
                    moved[id(parameter)] = torch.nn.Parameter(Remote(parameter.data), requires_grad=False)
                if parameter is not None:
                    module._parameters[name] = moved[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = Remote(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name not in _WHOLE and _is_composite(func):
            TorchDispatchMode.__enter__(self)  # torch has left the mode within its own handler
            try:
                return func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        remote = [isinstance(tensor, Remote) for tensor in _tensors((args, kwargs))]
        devices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        there = DEVICE in devices if devices else any(remote)
        if any(remote) and name not in _COPIES:
            _check(func, name, args, kwargs)
        known = {id(tensor.own): tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, Remote)}
        result = func(*_inner(args), **_inner(kwargs))
        if any(remote) or there:
            self._count(func, name, (args, kwargs), result)
        if not there or name in _READ:
            return result
        return tree_map_only(
            Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else Remote(tensor), result
        )

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Runs a kernel of Triton."""
        self.work.launches[kernel.__name__] += 1
        with self._counting_bytes():
            launch(kernel, grid, *_inner(args), **constants)

    @contextmanager
    def _counting_bytes(self) -> Iterator[None]:
        from triton.runtime.interpreter import interpreter_builder as builder

        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
            loaded = load(pointers, mask, *rest)
            self.work.bytes += len(np.unique(pointers.data[mask.data])) * loaded.data.itemsize
            return loaded

        def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.work.bytes += int(np.count_nonzero(mask.data)) * value.data.itemsize
            return store(pointers, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
        try:
            yield
        finally:
            del builder.create_masked_load, builder.create_masked_store

    def _count(self, func: Any, name: str, given: tuple[Any, Any], result: Any) -> None:
        tensors = list(_tensors(given))
        if name in _COPIES and self._crossed(name, given, tensors):
            return
        for index in (each for each in tensors[1:] if name in _INDEXED and not isinstance(each, Remote) and each.dim()):
            self._send(index, blocking=True)
        if name in _SHAPED_BY_VALUES or name in _READ or _selects(name, given):
            self.work.waits[name] += 1
            self.work.to_host += 1
        if name != "_local_scalar_dense" and name not in _FREE and not _is_view(func):
            self.work.launches[name] += 1
            read = tensors[1:] if name in _PARTLY else tensors
            self.work.bytes += sum(map(_bytes, [*read, *_tensors(result)]))

    def _crossed(self, name: str, given: tuple[Any, Any], tensors: list[Tensor]) -> bool:
        """Counts a copy between the devices; False for one within the device."""
        args, kwargs = given
        if name == "copy_":
            source, arrives = tensors[1], isinstance(tensors[0], Remote)
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, arrives = tensors[0], kwargs.get("device", tensors[0].device) == DEVICE
            blocking = not kwargs.get("non_blocking", False)
        if isinstance(source, Remote) == arrives:
            return False
        if arrives:
            self._send(source, blocking)
        else:
            self.work.to_host += 1
            self.work.waits["copy to the host"] += 1
        return True

    def _send(self, source: Tensor, blocking: bool) -> None:
        self.work.to_device += 1
        self.work.bytes_to_device += source.nbytes
        if blocking:
            self.work.waits["copy to the device"] += 1
        elif not hasattr(source, _PINNED):
            self.work.waits["copy to the device, from memory that is not pinned"] += 1


class _Python(TorchFunctionMode):
    """What never gets as far as an operator."""

    def __init__(self, device: VirtualGPU) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is launch:
            return self._device.launch(*args, **kwargs)
        if func is torch.tensor and kwargs.get("device") == DEVICE:  # on `meta` it would fill nothing in
            return func(*args, **(kwargs | {"device": "cpu"})).to(DEVICE)
        if func is Tensor.tolist and isinstance(args[0], Remote):
            self._device.work.waits["tolist"] += 1
            self._device.work.to_host += 1
            return args[0].own.tolist()
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            setattr(pinned, _PINNED, True)
            return pinned
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], Remote):
            args = (args[0], _listed(args[1]), *args[2:])
        return func(*args, **kwargs)


def _is_composite(func: Any) -> bool:
    """Whether an operator is others to a device: under `inference_mode` torch hands it over whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_view(func: Any) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)


def _selects(name: str, given: tuple[Any, Any]) -> bool:
    """Whether an index is a mask on the device: how many places it has must be known on the host."""
    if name not in _INDEXED:
        return False
    masks = [each for each in _tensors(given[0][1]) if each.dtype is torch.bool and isinstance(each, Remote)]
    fills = name != "index" and given[0][2].numel() == 1  # that needs no places
    return bool(masks) and not fills


def _bytes(tensor: Tensor) -> int:
    """Of the memory behind a tensor; what is expanded lies there once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size < 2)
    return math.prod(sizes) * tensor.element_size()


def _listed(index: Any) -> Any:
    """An index in which lists are tensors: made for a tensor on `meta` they would not be filled in."""
    if isinstance(index, tuple):
        return tuple(_listed(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _check(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Numbers may be on the CPU, and so may indices, which are sent."""
    looked_at = args[0] if name in _INDEXED else (args, kwargs)
    if any(tensor.dim() for tensor in _tensors(looked_at) if not isinstance(tensor, Remote)):
        raise RuntimeError(f"{func} brings tensors of two devices together")


def _inner(tree: Any) -> Any:
    tree = tree_map_only(Remote, lambda tensor: tensor.own, tree)
    return tree_map_only(torch.device, lambda device: torch.device("cpu"), tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
