"""A second device on a machine that has none: tensors that claim another device, and compute on the CPU.

Whoever brings one together with a tensor on the CPU gets an error, as on a GPU, and what crosses over is noted: what is
sent there, and what the host has to wait for. The device's name is `meta`, which any build of torch knows; unlike its
own tensors these have numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal"}
WAITS |= {"nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique2"}
"""Operations whose result's value or shape the host has to wait for."""
ELSEWHERE = torch.device("meta")
_INDEXED = ("index", "index_put_", "index_put")
_COPIES = ("_to_copy", "to")


class Remote(Tensor):
    """A tensor that is elsewhere; of use only while an `Elsewhere` is entered."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Remote:
        remote: Remote = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=ELSEWHERE
        )
        remote.inner = inner
        return remote

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} after its device was left")


class Elsewhere(TorchDispatchMode):
    """While it is entered, `device="meta"` means elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        """Operations that brought something there."""
        self.waits: list[str] = []
        """Operations for whose result the host must wait."""
        self._python = _Python(self)

    def __enter__(self) -> Elsewhere:
        self._python.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._python.__exit__(*error)

    def move(self, model: torch.nn.Module) -> None:
        """The model's weights and buffers go there."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(Remote(parameter.data), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = Remote(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        remote = [isinstance(tensor, Remote) for tensor in _tensors((args, kwargs))]
        devices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        there = ELSEWHERE in devices if devices else any(remote)
        self._note(name, remote, there)
        if any(remote):
            _check(func, name, args, kwargs)
        known = {id(tensor.inner): tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, Remote)}
        result = func(*_inner(args), **_inner(kwargs))
        if not there:
            return result
        return tree_map_only(
            Tensor, lambda tensor: known[id(tensor)] if id(tensor) in known else Remote(tensor), result
        )

    def _note(self, name: str, remote: list[bool], there: bool) -> None:
        here, mixed = not all(remote), any(remote) and not all(remote)
        if name in _COPIES:
            arrives, waits = there and here, not there and not here
        elif name == "copy_":
            arrives, waits = mixed and remote[0], mixed and remote[1]
        else:
            arrives, waits = mixed and name in _INDEXED, any(remote) and name in WAITS
        if arrives:
            self.sent.append(name)
        if waits:
            self.waits.append(name)


class _Python(TorchFunctionMode):
    """What never gets as far as an operation."""

    def __init__(self, books: Elsewhere) -> None:
        super().__init__()
        self._books = books

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") == ELSEWHERE:  # on `meta` it would fill nothing in
            return func(*args, **(kwargs | {"device": "cpu"})).to(ELSEWHERE)
        if func is Tensor.tolist and isinstance(args[0], Remote):
            self._books.waits.append("tolist")
            return args[0].inner.tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], Remote):
            args = (args[0], _listed(args[1]), *args[2:])
        return func(*args, **kwargs)


def _listed(index: Any) -> Any:
    """An index in which lists are tensors: made for a tensor on `meta` they would not be filled in."""
    if isinstance(index, tuple):
        return tuple(_listed(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _check(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Numbers may be on the CPU, and so may indices, which are sent."""
    if name in (*_COPIES, "copy_"):
        return
    looked_at = args[0] if name in _INDEXED else (args, kwargs)
    if any(tensor.dim() for tensor in _tensors(looked_at) if not isinstance(tensor, Remote)):
        raise RuntimeError(f"{func} brings tensors of two devices together")


def _inner(tree: Any) -> Any:
    tree = tree_map_only(Remote, lambda tensor: tensor.inner, tree)
    return tree_map_only(torch.device, lambda device: torch.device("cpu"), tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
