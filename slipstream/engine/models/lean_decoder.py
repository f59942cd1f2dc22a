"""The lean forward pass: a Llama-like decoder in as few operations as it takes.

RMSNorm, rotary embeddings, grouped-query attention with optional biases and optional norms of queries and keys, SwiGLU.
Around the linear layers the library's modelling code costs more than a small model itself; here a layer is some twenty
operators, and all layers are one call where there are kernels for them. Weights are taken from the library's modules,
layer by layer; attention belongs to the step, as everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, silu

from slipstream.engine.engine import HiddenRequest, HiddenStates, ModelOutput
from slipstream.engine.forward import ForwardStep
from slipstream.engine.kernels.attention import PagedLayer
from slipstream.engine.kernels.decoder import LayerParts, PackedLayers
from slipstream.engine.kernels.norms import RmsNorm
from slipstream.engine.models.linear import UNPACKED, Linear
from slipstream.engine.models.rotation_tables import rotation_tables


class Rotation:
    """Turns the heads of one step's tokens."""

    def __init__(self, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """cosine, sine [T, dim]."""
        self.cosine, self.sine = cosine, sine
        self._half = cosine.shape[-1] // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, dim]."""
        return torch.addcmul(x * self.cosine.unsqueeze(1), x.roll(self._half, -1), self.sine.unsqueeze(1))


class Rotary:
    """Tables [length, dim] in the dtype and on the device of `like`.

    Whatever type of scaling the module computes, it is right as long as it is the same for every step; positions have
    to end where it is not (`slipstream.engine.models.checkpoint`).
    """

    def __init__(self, module: Any, like: torch.Tensor) -> None:
        self._module = module
        self._like = like[:0]
        self._cosine = self._sine = like[:0]

    def reserve(self, length: int) -> None:
        """Tables for the positions below `length`, at least."""
        if length <= len(self._cosine):
            return
        self._cosine, sine = rotation_tables(self._module, self._like, length)
        # Rolled by half, the second half of a head comes to the place of the first one: there the sign is minus.
        half = sine.shape[-1] // 2
        self._sine = torch.cat((-sine[:, :half], sine[:, half:]), dim=-1)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions int64 [T]."""
        return Rotation(self._cosine.index_select(0, positions), self._sine.index_select(0, positions))


def norm(module: Any) -> RmsNorm:
    return RmsNorm(module.weight.detach(), module.variance_epsilon)


class Attention:
    def __init__(self, module: Any, window: int | None) -> None:
        self.layer_idx: int = module.layer_idx
        self._dim: int = module.head_dim
        self._extras: dict[str, object] = {"scaling": module.scaling, "sliding_window": window}
        self._keys = module.k_proj.out_features // self._dim
        self._queries = module.q_proj.out_features // self._dim
        self._norms = (norm(module.q_norm), norm(module.k_norm)) if hasattr(module, "q_norm") else None
        self._joined = Linear([module.q_proj, module.k_proj, module.v_proj])
        self._out = Linear([module.o_proj])
        self.paged = PagedLayer(self.layer_idx, self._queries, window, module.scaling)

    def __call__(self, x: torch.Tensor, rotation: Rotation, step: ForwardStep) -> torch.Tensor:
        """x [T, hidden], already normalised."""
        states = self._joined(x).view(x.shape[0], -1, self._dim)
        turned, value = states.split((self._queries + self._keys, self._keys), dim=1)
        if self._norms is not None:
            query, key = turned.split((self._queries, self._keys), dim=1)
            turned = torch.cat((self._norms[0](query), self._norms[1](key)), dim=1)
        turned = rotation(turned)
        query, key = turned.split((self._queries, self._keys), dim=1)
        heads_first = (query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        found = step.attend(self, heads_first, self._extras)
        return self._out(found.reshape(x.shape[0], -1))


class DecoderLayer:
    def __init__(self, module: Any, window: int | None) -> None:
        self._before_attention = norm(module.input_layernorm)
        self._attention = Attention(module.self_attn, window)
        self._before_feed = norm(module.post_attention_layernorm)
        self._gate_up = Linear([module.mlp.gate_proj, module.mlp.up_proj])
        self._down = Linear([module.mlp.down_proj])

    def __call__(self, x: torch.Tensor, rotation: Rotation, step: ForwardStep) -> torch.Tensor:
        x = x + self._attention(self._before_attention(x), rotation, step)
        gate, up = self._gate_up(self._before_feed(x)).chunk(2, dim=1)
        return x + self._down(silu(gate).mul_(up))

    def parts(self) -> LayerParts | None:
        """Parts that the compiled kernels compute the layer with; None if they cannot."""
        attention = self._attention
        qkv, out = attention._joined.packed, attention._out.packed
        gate_up, down = self._gate_up.packed, self._down.packed
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        norms = (self._before_attention, self._before_feed, attention._norms)
        return LayerParts(qkv, out, gate_up, down, *norms)


class LeanDecoder:
    """Takes the weights of the library's model, which is of no use afterwards. `windows` are the layers' sliding
    windows."""

    def __init__(self, model: Any, windows: list[int | None]) -> None:
        inner, head = model.model, model.lm_head
        self._embedding: torch.Tensor = inner.embed_tokens.weight.detach()
        self._rotary = Rotary(inner.rotary_emb, self._embedding)
        self._layers = [DecoderLayer(module, window) for module, window in zip(inner.layers, windows, strict=True)]
        self._norm = norm(inner.norm)
        # Embeddings are looked up row by row, which packed weights do not offer: tied ones are there twice.
        self._head = Linear([head], keep=head.weight is inner.embed_tokens.weight)
        parts = [layer.parts() for layer in self._layers]
        known = [each for each in parts if each is not None]
        self._packed = PackedLayers(known) if len(known) == len(parts) else None
        self._paged = tuple(layer._attention.paged for layer in self._layers)

    @property
    def path(self) -> str:
        return "lean" if self._packed is None else "kernels"

    @property
    def uneven(self) -> frozenset[str]:
        return UNPACKED if self._packed is None else frozenset()

    def reserve(self, length: int) -> None:
        self._rotary.reserve(length)

    def detach(self) -> None:
        """Lets go of the KV of the last step."""
        if self._packed is not None:
            self._packed.detach()

    def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
        x = embedding(step.tokens[0], self._embedding)
        rotation = self._rotary(step.positions[0])
        requested = hidden.layers if hidden is not None else ()
        attention = None if self._packed is None else step.paged(self._paged)
        if self._packed is not None and attention is not None:
            kept = self._packed(x, (rotation.cosine, rotation.sine), attention, requested)
        else:
            kept = {}
            for number, layer in enumerate(self._layers):
                if number in requested:
                    kept[number] = x
                x = layer(x, rotation, step)
        logits = self._head(self._norm(x.index_select(0, step.wanted)))
        return ModelOutput(logits, HiddenStates(self._norm(x), kept) if hidden is not None else None)
