"""The library's modelling code on a CPU with the parts of it replaced whose bits depend on how many rows a pass has.

products       by our kernels, which add up every row alike (`packed_weight`); experts one after the other
activations    by our kernels; torch computes the end of an array by other instructions (`kernels.activations`)
rotation       from tables; the library computes cosines of a pass's positions, of which the same is true
attention      the step's, as everywhere

Whether that was all of it is not believed: a pass is watched, and each operator must be of a kind that computes rows
alike. A model with any other one is served without the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.engine.kernels.activations import Activation
from slipstream.engine.kernels.compiled import KINDS, Kernels, find_kernels
from slipstream.engine.models.attention_layers import Probe, run_tiny_pass
from slipstream.engine.models.linear import UNPACKED
from slipstream.engine.models.packed_weight import PackedWeight, ProductsSeen, Use, packed
from slipstream.engine.models.rotation_tables import rotation_tables

ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "gelu_sigmoid",
}
"""Names of torch's and the library's modules, with ours."""
FUNCTIONS: dict[Callable[..., Any], str] = {
    torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
    nn.functional.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    torch.Tensor.tanh: "tanh",
    nn.functional.tanh: "tanh",
    nn.functional.silu: "silu",
}
ROWWISE = {
    *("mean", "sum", "amax", "argmax", "max", "cumsum", "topk", "sort", "_softmax", "softmax", "native_layer_norm"),
    *("layer_norm", "rms_norm", "_fused_rms_norm", "cat", "stack", "index", "index_select", "gather", "embedding"),
    *("one_hot", "nonzero", "index_add", "index_put", "scatter", "scatter_add", "where", "repeat", "constant_pad_nd"),
    *("copy", "_to_copy", "to", "type_as", "clone", "contiguous", "reshape", "roll", "flip", "item", "is_nonzero"),
    *("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "full"),
    *("new_ones", "new_full"),
    *("full_like", "fill", "scalar_tensor", "arange", "lift_fresh", "_local_scalar_dense"),
}
"""Operators that compute each row by itself, all of them alike (`test_rowwise_operators.py`)."""
EXACT = {
    *(
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "multiply",
        "subtract",
        "divide",
        "true_divide",
        "neg",
        "abs",
        "sign",
        "square",
    ),
    *("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "relu", "sqrt", "reciprocal", "floor", "ceil", "round"),
    *("eq", "ne", "gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "logical_and", "logical_or", "logical_not"),
    *("__and", "__or", "__xor", "all", "any", "diff"),
    *("masked_fill", "threshold", "leaky_relu", "isnan", "isinf", "nan_to_num"),
}
"""Operators of single numbers that are rounded once: alike wherever a number stands. Of others (exponentials, cosines)
torch computes the end of an array by other instructions than the rest."""
POWERS = (-2, -1, 0.5, 1, 2, 3)
"""Exponents that are products, quotients and roots: exact but for one rounding, so alike everywhere."""


class _Operators(TorchDispatchMode):
    """Notes operators that are not known to compute rows alike."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uneven: list[tuple[str, list[torch.Size]]] = []
        """Names, and shapes of what they were given and made, in the order of a pass."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        if not _alike(func, name, args):
            tensors = (each for each in tree_leaves((args, kwargs, made)) if isinstance(each, torch.Tensor))
            self.uneven.append((name, [each.shape for each in tensors]))
        return made


def _alike(func: Any, name: str, args: tuple[Any, ...]) -> bool:
    name = name.rstrip("_")
    if func.is_view or name in ROWWISE or name in EXACT:
        return True
    if name == "dropout":
        return not args[2]
    power = args[1] if name == "pow" and isinstance(args[1], int | float) else None
    if power in POWERS:
        return True
    if name == "rsqrt" or power == -0.5:
        return bool(args[0].dtype is torch.float32)  # of narrow types the last ones are rounded otherwise
    return False


class Rotations(nn.Module):
    """Cosines and sines of positions, as the library's module computes them, from tables."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._length = 0
        self._tables: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of the library's own module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def reserve(self, length: int) -> None:
        """Positions below `length` may be asked for."""
        if length > self._length:
            self._length = length
            self._tables.clear()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        """position_ids int64 [1, T]. Returns what the module does, [1, T, dim] each. Positions of several axes are the
        module's own."""
        if position_ids.dim() != 2:
            return self.module(x, position_ids, *rest, **more)
        key = (x.dtype, *rest, *more.items())
        if key not in self._tables:
            self._tables[key] = rotation_tables(self.module, x[:, :1], self._length, *rest, **more)
        rows = tuple(table.index_select(0, position_ids[0]).unsqueeze(0) for table in self._tables[key])
        return rows if len(rows) > 1 else rows[0]


class _OurFunctions(TorchFunctionMode):
    """Activations that modelling code calls as functions. Every call of torch goes through here meanwhile, some
    microsecond each, so that it is used for models that need it."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._ours = {function: Activation(kernels, name) for function, name in FUNCTIONS.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ours = self._ours.get(func)
        if ours is not None and len(args) == 1 and not kwargs and args[0].dtype in KINDS:
            return ours.forward(args[0])
        return func(*args, **kwargs) if kwargs else func(*args)


class PackedLibrary(NamedTuple):
    """Additions to a library's model that its passes take after `pack_library`."""

    rotations: list[Rotations]
    functions: AbstractContextManager[Any]
    """Active in each pass."""
    uneven: frozenset[str]
    """`slipstream.engine.forward.Forward.uneven`."""


_packs: ContextVar[bool] = ContextVar("packs", default=True)


@contextmanager
def unpacked() -> Iterator[None]:
    """Models that are loaded meanwhile stay as the library made them: for tools that read or move their weights."""
    token = _packs.set(False)
    try:
        yield
    finally:
        _packs.reset(token)


def pack_library(model: Any) -> PackedLibrary:
    """Replaces parts of a model on a CPU; its parameters are taken. Elsewhere it is left as it is."""
    kernels, cpu = find_kernels(), torch.device("cpu")
    if kernels is None or not _packs.get() or any(each.device != cpu for each in model.parameters()):
        return PackedLibrary([], nullcontext(), UNPACKED)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    rotations = _replace_modules(model, kernels)
    for each in rotations:
        each.reserve(3)
    _replace_weights(model, _uses_of_weights(model))
    functions: AbstractContextManager[Any] = nullcontext()
    uneven = _uneven(model, functions)
    if uneven & set(FUNCTIONS.values()):
        functions = _OurFunctions(kernels)
        uneven = _uneven(model, functions)
    return PackedLibrary(rotations, functions, uneven)


def _replace_modules(model: Any, kernels: Kernels) -> list[Rotations]:
    """Activations and rotations."""
    rotations: dict[int, Rotations] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        kind = type(module).__name__
        if kind in ACTIVATIONS:
            model.set_submodule(name, Activation(kernels, ACTIVATIONS[kind]))
        elif kind == "GELU":
            model.set_submodule(name, Activation(kernels, "gelu_tanh" if module.approximate == "tanh" else "gelu"))
        elif kind.endswith("RotaryEmbedding"):
            model.set_submodule(name, rotations.setdefault(id(module), Rotations(module)))
    return list(rotations.values())


def _uses_of_weights(model: Any) -> Mapping[int, Use]:
    """By the id of the parameter. Nothing else is kept, so that each weight is let go of when it is replaced."""
    seen = ProductsSeen(model)
    with seen:
        run_tiny_pass(model, torch.device("cpu"), Probe())
    return seen.uses


def _replace_weights(model: Any, uses: Mapping[int, Use]) -> None:
    made: dict[int, PackedWeight | None] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in uses or isinstance(module, nn.Embedding):
                continue
            if id(weight) not in made:
                made[id(weight)] = packed(weight, uses[id(weight)])
            if made[id(weight)] is not None:
                del module._parameters[name]
                setattr(module, name, made[id(weight)])


def _uneven(model: Any, functions: AbstractContextManager[Any]) -> frozenset[str]:
    """Names of operators whose rows may depend on the others. What has the same shapes in passes of two and of three
    tokens computes no rows: slopes of ALiBi, which some models compute in every pass, are as many as heads."""
    seen = []
    for tokens in (2, 3):
        with _Operators() as operators, functions:
            run_tiny_pass(model, torch.device("cpu"), Probe(), tokens)
        seen.append(operators.uneven)
        if not operators.uneven:
            return frozenset()
    two, three = seen
    if [name for name, _ in two] != [name for name, _ in three]:
        return frozenset(name for name, _ in (*two, *three))
    return frozenset(name for (name, shapes), (_, others) in zip(two, three, strict=True) if shapes != others)
