"""Weights of the library's modules that kernels of ours multiply, in place of the parameters.

Torch's products choose by the number of rows how they add up a row; our kernels do not. Which parameters are weights of
products, which way round they lie and whose experts they hold is seen in a pass of the model (`ProductsSeen`), so that
any module that multiplies by a parameter can do so by a `PackedWeight`, routers and experts as linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode

from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.kernels.products import PackedProduct, multiplies
from slipstream.engine.models.linear import lay_out, quantised_bytes

_SHAPE = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex"}
"""Names of functions that read no number of a weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Use of a parameter in a product."""

    turned: bool
    """[in, out] or [experts, in, out], not [out, in]."""
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Type that it is read as: routers may compute in float32 whatever the model's type is."""

    def equals(self, other: Use) -> bool:
        return (self.turned, self.dtype) == (other.turned, other.dtype) and self.bias is other.bias


class ProductsSeen(TorchFunctionMode):
    """While it is active, notes which parameters of a model are weights of products and of nothing else."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {id(each): each for each in model.parameters()}
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        """By id, one expert's weight or a parameter in another type, kept so that the id stays its own, with the id of
        the parameter."""
        self._uses: dict[int, Use] = {}
        self._others: set[int] = set()

    @property
    def uses(self) -> Mapping[int, Use]:
        """By the id of the parameter."""
        return {each: use for each, use in self._uses.items() if each not in self._others}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        made_from = self._owner(args[0]) if args and (func in _CASTS or _takes_expert(func, args)) else None
        if made_from is not None:
            self._made[id(result)] = result, made_from
            return result
        product = _product(func, args, given)
        if product is not None and (owner := self._owner(product.weight)) is not None:
            # That of one expert is added behind the product.
            bias = product.bias if id(product.bias) in self._known else None
            use = Use(product.turned, bias, product.weight.dtype)
            if not self._uses.setdefault(owner, use).equals(use):
                self._others.add(owner)
        if func in (torch.embedding, embedding) or getattr(func, "__name__", "") in _SHAPE:
            return result
        known = () if product is None else (product.weight, product.bias)
        others = (each for each in _values((*args, *given.values())) if not any(each is one for one in known))
        self._others.update(owner for owner in map(self._owner, others) if owner is not None)
        return result

    def _owner(self, value: object) -> int | None:
        """The id of the parameter that a value is or was made from."""
        if id(value) in self._known:
            return id(value)
        found = self._made.get(id(value))
        return None if found is None else found[1]


def _takes_expert(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    if func is not torch.Tensor.__getitem__ or args[0].dim() != 3:
        return False
    return isinstance(args[1], int) or (isinstance(args[1], torch.Tensor) and args[1].dim() == 0)


def _values(given: Iterable[Any]) -> Iterator[Any]:
    """With those of lists among them."""
    for each in given:
        yield from each if isinstance(each, list | tuple) else (each,)


class _ProductCall(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    turned: bool


def _product(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> _ProductCall | None:
    """A call as a product with a weight; None for any other function."""
    if func is linear:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | given
        return _ProductCall(named["input"], named["weight"], named.get("bias"), False)
    if func in _MATMULS and len(args) == 2:
        return _ProductCall(args[0], args[1], None, True)
    if func is torch.addmm and not given and len(args) == 3:
        return _ProductCall(args[1], args[2], args[0], True)
    return None


_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_CASTS = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.float}


class PackedWeight(torch.Tensor):
    """Stands where a parameter of this shape and type stood. It can be multiplied by, and of several experts' one be
    taken; it has no numbers to be read."""

    _product: PackedProduct | None
    _use: Use
    _experts: list[PackedWeight]

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, use: Use, products: list[PackedProduct]) -> PackedWeight:
        """`products`: one, or that of each expert."""
        made: PackedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        several = len(shape) == 3
        made._product, made._use = None if several else products[0], use
        made._experts = [cls.of(shape[1:], dtype, use, [each]) for each in products] if several else []
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.__getitem__:
            return args[0]._experts[int(args[1])]
        if func in _CASTS and isinstance(args[0], PackedWeight):
            return args[0]  # what it was read as was seen
        product = _product(func, args, given)
        if product is not None and isinstance(product.weight, PackedWeight):
            return product.weight._multiply(product.x, product.bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a weight that is packed for products")

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        product = self._product
        if product is None:
            raise NotImplementedError("a product with all experts at once")
        y = product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], product.features)
        return y if bias is None or self._use.bias is not None else y + bias


def packed(weight: torch.Tensor, use: Use) -> PackedWeight | None:
    """A copy of a parameter; None if no kernel of ours multiplies by it."""
    kernels, shape = find_kernels(), weight.shape
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    if len(shape) not in (2, 3) or not (plain or (quantised_bytes(weight) is not None and not use.turned)):
        return None
    parts = list(weight.detach()) if len(shape) == 3 else [weight.detach()]
    if plain:
        parts = [(each.t() if use.turned else each).to(use.dtype) for each in parts]
    if plain and not all(multiplies(kernels, each) for each in parts):
        return None
    bias = None if use.bias is None else use.bias.detach()
    products = [each for each in (lay_out([part], bias) for part in parts) if isinstance(each, PackedProduct)]
    return PackedWeight.of(shape, weight.dtype, use, products) if len(products) == len(parts) else None
