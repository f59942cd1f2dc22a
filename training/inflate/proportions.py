"""The proportions of a decoder, and a usual choice of them for a requested number of parameters."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.errors import InvalidArgument

COPIES = (1, 2, 4, 8, 16)
MLP_RATIO = 3.0  # the usual width of an MLP against the stream

# (what the rows are, what the columns are) of every projection inside a layer.
PROJECTIONS = {
    "q_proj": ("heads", "stream"),
    "k_proj": ("kv_heads", "stream"),
    "v_proj": ("kv_heads", "stream"),
    "o_proj": ("stream", "heads"),
    "gate_proj": ("feed_forward", "stream"),
    "up_proj": ("feed_forward", "stream"),
    "down_proj": ("stream", "feed_forward"),
}


@dataclass(frozen=True)
class InflateRequest:
    """About how many `parameters`; `hidden` and `layers` are chosen if None; `seed` decides the random weights."""

    parameters: int
    hidden: int | None = None
    layers: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Proportions:
    """The shape of a decoder. Sizes in features, `copies` of the base's stream."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool
    copies: int = 1

    @classmethod
    def of(cls, config: dict[str, Any]) -> Proportions:
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            feed_forward=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def width(self, role: str) -> int:
        """Features of a projection's rows or columns."""
        if role == "stream":
            return self.hidden
        if role == "feed_forward":
            return self.feed_forward
        return (self.heads if role == "heads" else self.kv_heads) * self.head_dim

    def parameters(self) -> int:
        """Number of parameters of all projections and embeddings (norms and biases are noise)."""
        layer = sum(self.width(rows) * self.width(columns) for rows, columns in PROJECTIONS.values())
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)


def choose_proportions(base: Proportions, request: InflateRequest) -> Proportions:
    """A usual shape of about the requested size: depth by size, then the stream whose MLP is closest to 3 x as wide."""
    if request.hidden is not None and request.hidden not in [base.hidden * copies for copies in COPIES]:
        allowed = ", ".join(str(base.hidden * copies) for copies in COPIES)
        raise InvalidArgument(f"The hidden size must be one of {allowed}: only whole copies of the stream are exact.")
    if request.layers is not None and request.layers < base.layers:
        raise InvalidArgument(f"The model already has {base.layers} layers; ask for at least as many.")
    layers = request.layers or max(base.layers, round(14 * (request.parameters / 1e8) ** 0.25))
    options = [
        _fitted(base, layers, copies, request.parameters)
        for copies in COPIES
        if request.hidden in (None, base.hidden * copies)
    ]
    return min(options, key=lambda option: _oddness(option, request.parameters))


def _fitted(base: Proportions, layers: int, copies: int, parameters: int) -> Proportions:
    kind = {**asdict(base), "hidden": base.hidden * copies, "layers": layers, "copies": copies}
    kind |= {"heads": base.heads * copies, "kv_heads": base.kv_heads * copies, "feed_forward": 0}
    rest = parameters - Proportions(**kind).parameters()
    width = round(rest / (3 * layers * kind["hidden"] * 64)) * 64
    return Proportions(**{**kind, "feed_forward": max(base.feed_forward, width)})


def _oddness(option: Proportions, parameters: int) -> float:
    missed = abs(math.log(option.parameters() / parameters))
    return abs(math.log(option.feed_forward / option.hidden / MLP_RATIO)) + 100.0 * max(0.0, missed - 0.05)


def layer_origins(base: int, layers: int) -> list[int | None]:
    """The base layer at each position, None for an added one; spread evenly."""
    origins: list[int | None] = [None] * layers
    for layer in range(base):
        origins[layer * layers // base] = layer
    return origins
