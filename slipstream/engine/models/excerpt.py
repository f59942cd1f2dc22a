"""An excerpt of a loaded model: its first layers, on its own weights or on float32 copies of them.

It is a copy of the modules, not a model built anew from a shorter configuration: layers keep what the whole
configuration made of them (windows, rotary embeddings, shared keys, scales), and no weight is read again.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from slipstream.engine.models.quantisation import plain_linear
from slipstream.errors import FailedPrecondition

SHORT_WINDOW = 6
"""Positions that layers of a sliding window see in an excerpt: a text of a few tokens leaves them behind."""
SHORT_VOCABULARY = 4096
"""Tokens of an excerpt that leaves layers out."""
WHOLE_BYTES = 1 << 30
"""Float32 weights up to which an excerpt is the whole model."""
MOST_BYTES = 4 << 30
"""Float32 weights of layers in an excerpt, at most: beyond, kinds of layers that come late are left out."""
_NUMBERS = ("idx", "index", "number", "layer_id")
"""In names of attributes that say where a layer stands."""
_WINDOWS = ("sliding_window", "window_size", "attention_window", "local_attention")


class UnknownFormat(Exception):
    """Packed weights that are not unpacked here."""


class Excerpt:
    """Which part of a model stands for all of it: the whole if its float32 weights are small, else the first layers
    that cover every kind of layer, with the first tokens of the vocabulary."""

    def __init__(self, model: Any, whole_bytes: int | None = None) -> None:
        self._model = model
        most = WHOLE_BYTES if whole_bytes is None else whole_bytes
        self._name, layers = decoder_layers(model)
        self.is_whole = 4 * sum(_numel(each) for each in model.parameters()) <= most
        self.depth = len(layers) if self.is_whole else _first(layers)
        self.is_the_model = self.is_whole and not any(_windows(each) for each in _holders(model))
        """Nothing is left out and no window shortened: a pass on a copy that shares the weights may serve."""

    @property
    def vocabulary_size(self) -> int:
        size = int(self._model.get_output_embeddings().out_features)
        return SHORT_VOCABULARY if not self.is_whole and _can_be_cut(self._model) else size

    def copy(self, *, floats: bool) -> Any:
        """A model with this part's weights, shared; or with float32 copies of them. Its windows are short. Raises
        UnknownFormat for packed weights of which there are no such copies."""
        layers = self._model.get_submodule(self._name)
        shared: dict[int, Any] = {id(each): each for each in (*self._model.parameters(), *self._model.buffers())}
        left_out = nn.Identity()
        shared |= {id(each): left_out for each in layers[self.depth :]}
        model = copy.deepcopy(self._model, shared)
        copied = model.get_submodule(self._name)
        del copied[self.depth :]
        if not self.is_whole and _can_be_cut(model):
            _cut_vocabulary(model)
        if floats:
            _upcast(model)
        _shorten_windows(model)
        return model


def decoder_layers(model: Any) -> tuple[str, Any]:
    """Name and modules of the list that holds the attention layers, the outermost one. Raises FailedPrecondition
    for a model without one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(hasattr(part, "layer_idx") for part in module.modules()):
            return name, module
    raise FailedPrecondition(
        f"{type(model).__name__} cannot be served: it has no list of decoder layers.", reason="MODEL_UNSUPPORTED"
    )


def _first(layers: Any) -> int:
    """The fewest first layers among which each kind of layer is, two at least; fewer where those are too large."""
    first: dict[Hashable, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(_kind(layer), index)
    wanted = min(len(layers), max(2, 1 + max(first.values())))
    sizes = accumulate(4 * sum(_numel(each) for each in layer.parameters()) for layer in layers[:wanted])
    return max(1, sum(size <= MOST_BYTES for size in sizes))


def _kind(layer: nn.Module) -> Hashable:
    """Equal for layers that compute alike: modules, shapes and switches, but for a layer's own number."""
    parts = []
    for name, module in layer.named_modules():
        switches = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | str | None) and not any(part in key for part in _NUMBERS)
        ]
        shapes = [(key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False)]
        parts.append((name, type(module), tuple(switches), tuple(shapes)))
    return tuple(parts)


def _numel(weight: torch.Tensor) -> int:
    """Shape of the numbers that a weight stands for: packed ones hold two in a byte."""
    state = getattr(weight, "quant_state", None)
    return int(state.shape.numel()) if state is not None else weight.numel()


def is_quantised(module: nn.Module) -> bool:
    """True if the module's weight does not stand for itself."""
    weight = getattr(module, "weight", None)
    return callable(weight) or (
        isinstance(weight, torch.Tensor)
        and (type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() < 2)
    )


def _can_be_cut(model: Any) -> bool:
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    size = inputs.weight.shape[0]
    return type(head) is nn.Linear and head.weight.shape[0] == size > SHORT_VOCABULARY and not is_quantised(head)


def _cut_vocabulary(model: Any) -> None:
    """Tables of positions stay, however long they are."""
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    sizes = {inputs.weight.shape[0], getattr(model.config.get_text_config(), "vocab_size_per_layer_input", None)}
    cut: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if module is head or (isinstance(module, nn.Embedding) and module.weight.shape[0] in sizes):
            weight = module.weight.detach()[:SHORT_VOCABULARY]
            # Tied weights stay tied.
            module.weight = cut.setdefault(id(module.weight), nn.Parameter(weight, requires_grad=False))
            if isinstance(module, nn.Embedding):
                module.num_embeddings, module.padding_idx = SHORT_VOCABULARY, None
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.detach()[:SHORT_VOCABULARY], requires_grad=False)
    head.out_features = SHORT_VOCABULARY


def _upcast(model: Any) -> None:
    """Parameters are replaced, not changed: the model that serves has them too. Raises UnknownFormat."""
    for name, module in list(model.named_modules()):
        plain = plain_linear(module)
        if plain is not None:
            model.set_submodule(name, plain)
    floats: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if is_quantised(module):
                raise UnknownFormat(f"{name} in {weight.dtype}")
            module._parameters[key] = floats.setdefault(id(weight), nn.Parameter(weight.detach().float(), False))
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = buffer.float() if buffer.is_floating_point() else buffer


def _shorten_windows(model: Any) -> None:
    """In modules, which hand it to attention functions, and in configurations, which masks are made from."""
    for holder in _holders(model):
        for key in _windows(holder):
            setattr(holder, key, SHORT_WINDOW)


def _windows(holder: Any) -> list[str]:
    """Names of its attributes that are windows longer than SHORT_WINDOW."""
    known = [(key, value) for key, value in vars(holder).items() if key in _WINDOWS]
    return [key for key, value in known if type(value) is int and value > SHORT_WINDOW]


def _holders(model: Any) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        yield module
        config: Any = getattr(module, "config", None)
        for each in (config, config.get_text_config(decoder=True)) if isinstance(config, PreTrainedConfig) else ():
            if id(each) not in seen:
                seen.add(id(each))
                yield each
