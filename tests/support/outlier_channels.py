"""Makes a few channels of a random model's residual stream far larger than the others, as trained models have them.

Families differ in the names of their parts and in where norms stand. Before a sublayer (pre-norm) a norm reads the
stream and makes the channels small again. Behind it (post-norm: GPT, BERT) a norm makes the stream itself, and the
matrices that read it make the channels small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

CHANNELS = (5, 23, 42)
FACTOR = 64.0
"""Of the activations of `CHANNELS` beside the others'."""
EMBEDDING = 4.0
"""Times the initial embeddings: what layers add is small beside the stream, as in trained models. Without it rounding
grows from layer to layer until bfloat16 says nothing; with it the library's own bfloat16 is 3 to 20 % of a row's spread
away from its float32, and up to 100 % in the worst row, as in trained Qwen 2 models."""


@dataclass(frozen=True)
class Stream:
    """Ends of names of the parts around a residual stream."""

    begins: tuple[str, ...]
    """Embeddings [tokens, hidden], a matrix [hidden, inputs] or a norm [hidden]: their output begins the stream."""
    adds: tuple[str, ...]
    """Matrices whose output is added to the stream."""
    norms: tuple[str, ...]
    readers: tuple[str, ...] = ()
    """Matrices that read the stream where norms stand behind sublayers. Empty: norms stand before them."""
    turned: bool = False
    """Matrices are [inputs, outputs]."""

    def role(self, part: str) -> str:
        """The field that names this part; empty for one that has nothing to do with the stream."""
        return next((role for role in ("begins", "norms", "adds", "readers") if part.endswith(getattr(self, role))), "")


STREAMS: Mapping[str, Stream] = {
    "falcon": Stream(("word_embeddings",), ("attention.dense", "dense_4h_to_h"), ("ln_attn", "ln_mlp", "ln_f")),
    "falcon_alibi": Stream(
        ("word_embeddings",), ("attention.dense", "dense_4h_to_h"), ("input_layernorm", "attention_layernorm", "ln_f")
    ),
    "bloom": Stream(
        ("embeddings_layernorm",),
        ("attention.dense", "dense_4h_to_h"),
        ("input_layernorm", "attention_layernorm", "ln_f"),
    ),
    "mpt": Stream(("wte",), ("attn.out_proj", "down_proj"), ("norm_1", "norm_2", "norm_f")),
    "gpt_neo": Stream(("wte", "wpe"), ("attention.out_proj", "c_proj"), ("ln_1", "ln_2", "ln_f")),
    "gpt_neox_japanese": Stream(
        ("embed_in",),
        ("attention.dense", "dense_4h_to_h"),
        ("input_layernorm", "attention_layernorm", "final_layer_norm"),
    ),
    "xglm": Stream(
        ("embed_tokens",), ("self_attn.out_proj", "fc2"), ("attn_layer_norm", "final_layer_norm", ".layer_norm")
    ),
    "openai_gpt": Stream(("tokens_embed",), ("c_proj",), ("ln_1", "ln_2"), ("c_attn", "c_fc", "lm_head"), turned=True),
    "rembert": Stream(
        ("hidden_mapping_in",),
        ("output.dense",),
        ("attention.output.LayerNorm", "output.LayerNorm"),
        ("query", "key", "value", "intermediate.dense", "predictions.dense"),
    ),
    "megatron_bert": Stream(("embeddings",), ("output.dense",), ("ln",)),
}
"""Of families whose attention layers are older than the library's interface."""


@torch.no_grad()
def enlarge_stream(model: Any, stream: Stream) -> None:
    """Makes `CHANNELS` of the residual stream `FACTOR` times as large, without a change of what follows from them."""
    hidden = model.config.hidden_size
    share = (2 * model.config.num_hidden_layers) ** -0.5  # of a sublayer's part, as in GPT-2's initialisation
    found = set()
    for name, weight in model.named_parameters():
        part, _, kind = name.rpartition(".")
        role = stream.role(part)
        found.add(role)
        if role == "begins":
            weight.mul_(EMBEDDING if kind == "weight" else 1.0)
            scale_channels(weight, int(weight.dim() == 2 and weight.shape[1] == hidden), FACTOR)
        elif role == "norms" and stream.readers:
            weight.mul_(spread(len(weight)) if kind == "weight" else 1.0)
        elif role == "norms":
            quieten(weight, FACTOR, 0.0, kind == "weight")
        elif role == "adds":
            scale_channels(weight.mul_(share), int(weight.dim() == 2 and stream.turned), FACTOR)
        elif role == "readers" and weight.dim() == 2:
            scale_channels(weight, int(not stream.turned or part == "lm_head"), 1.0 / FACTOR)
    assert found >= {"begins", "adds", "norms", *(["readers"] if stream.readers else [])}


def spread(width: int) -> float:
    """How many times the others' root mean square that of a whole row with outliers is, by which a norm divides it."""
    return float((1.0 + len(CHANNELS) / width * FACTOR**2) ** 0.5)


def quieten(weight: torch.Tensor, factor: float, offset: float, gain: bool) -> None:
    """A norm's weight: outliers are divided, and all others multiplied by what outliers take from them."""
    weight.add_(offset).mul_(spread(len(weight)) if gain else 1.0)
    weight[list(CHANNELS)] /= factor
    weight.sub_(offset)


def scale_channels(weight: torch.Tensor, axis: int, factor: float) -> None:
    index = [slice(None)] * weight.dim()
    index[axis] = list(CHANNELS)  # type: ignore[call-overload]
    weight[tuple(index)] *= factor
