"""A draft model's chain of four levels: each level eager, each level a graph, and the whole chain one graph.

The model has the shape of a Llama of 1 B parameters and random weights; its keys and values lie in a tensor of fixed
size, as graphs want them. At a level each session's last token becomes a row of logits, and the coupled rule's noise of
that position chooses the next one on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from benchmarks.gpu_session.timing import Bench, Figures
from slipstream.engine.sampler import torch_noise
from slipstream.speculation.noise import Purpose

LEVELS = 4
CONTEXTS, SESSIONS = (256, 2048, 8192), (1, 8)
TEMPERATURE = 0.8
BASE = 500_000.0


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 64
    feed: int = 8192
    vocabulary: int = 128_256


SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, dim=8, feed=64, vocabulary=97)


class StaticDecoder:
    """One token of each session a pass, at positions that lie on the device."""

    def __init__(self, shape: Shape, sessions: int, length: int, device: torch.device) -> None:
        self.shape = shape
        self.places = torch.arange(length, device=device)
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def weight(*size: int) -> Tensor:
            scale = size[-1] ** -0.5
            return torch.randn(*size, generator=generator, device=device).mul_(scale).to(kind)

        s = shape
        self.embedding = weight(s.vocabulary, s.hidden)
        self.blocks = [
            (
                weight((s.heads + 2 * s.kv_heads) * s.dim, s.hidden),
                weight(s.hidden, s.heads * s.dim),
                weight(2 * s.feed, s.hidden),
                weight(s.hidden, s.feed),
            )
            for _ in range(s.layers)
        ]
        size = (s.layers, 2, sessions, s.kv_heads, length, s.dim)
        self.kv = torch.randn(*size, generator=generator, device=device).to(kind)
        angles = torch.outer(
            torch.arange(length, device=device), BASE ** -(torch.arange(0, s.dim, 2, device=device) / s.dim)
        )
        self.cosine, self.sine = angles.cos().to(kind), angles.sin().to(kind)

    def logits(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens int64 [S] at `position` int64 [1] -> [S, vocabulary]."""
        s, x = self.shape, embedding(tokens, self.embedding)
        seen = (self.places <= position)[None, None, None]
        cosine, sine = self.cosine[position], self.sine[position]
        for (qkv, out, gate_up, down), kv in zip(self.blocks, self.kv, strict=True):
            states = linear(rms_norm(x, x.shape[-1:]), qkv).view(len(x), -1, s.dim)
            query, key, value = states.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
            kv[0].index_copy_(2, position, self._turned(key, cosine, sine)[:, :, None])
            kv[1].index_copy_(2, position, value[:, :, None])
            query = self._turned(query, cosine, sine)[:, :, None]
            read = scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=seen, enable_gqa=True)
            x = x + linear(read.reshape(len(x), -1), out)
            gate, up = linear(rms_norm(x, x.shape[-1:]), gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, down)
        return linear(rms_norm(x, x.shape[-1:]), self.embedding)

    @staticmethod
    def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        left, right = heads.chunk(2, dim=-1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class Chain:
    """Four levels behind `root`; what they chose stays on the device."""

    def __init__(self, model: StaticDecoder, sessions: int, context: int, device: torch.device) -> None:
        self.model = model
        self.root = torch.zeros(sessions, dtype=torch.int64, device=device)
        self.positions = torch.arange(context, context + LEVELS, device=device)[:, None]
        keys = [torch_noise.keys(range(sessions), [context + at] * sessions, Purpose.COUPLED) for at in range(LEVELS)]
        self.keys = torch.stack(keys).to(device)[..., None]
        self.ids = torch.arange(model.shape.vocabulary, device=device)
        self.tokens = torch.zeros(LEVELS, sessions, dtype=torch.int64, device=device)

    def level(self, at: int) -> None:
        given = self.tokens[at - 1] if at else self.root
        logits = self.model.logits(given, self.positions[at])
        scores = logits.double().div_(TEMPERATURE).add_(torch_noise.gumbel(self.keys[at], self.ids))
        self.tokens[at].copy_(scores.argmax(dim=-1))

    def all(self) -> None:
        for at in range(LEVELS):
            self.level(at)


@torch.inference_mode()
def measure(bench: Bench) -> Figures:
    found, shape = Figures(), SMALL if bench.small else Shape()
    for context in CONTEXTS[:1] if bench.small else CONTEXTS:
        for sessions in SESSIONS:
            model = StaticDecoder(shape, sessions, context + LEVELS, bench.device)
            chain = Chain(model, sessions, context, bench.device)
            levels = [bench.captured(partial(chain.level, at)) for at in range(LEVELS)]
            ways: dict[str, Callable[[], object]] = {
                "eager": chain.all,
                "captured levels": lambda levels=levels: [run() for run in levels],  # type: ignore[misc]
                "captured chain": bench.captured(chain.all),
            }
            chosen: list[list[list[int]]] = []
            for name, run in ways.items():
                chain.tokens.zero_()
                run()
                bench.wait()
                chosen.append(chain.tokens.tolist())
                seconds = bench.seconds(run, 3 if bench.small else 20)
                found[f"{sessions} x {context}: {name}, ms"] = 1e3 * seconds
            found[f"{sessions} x {context}: the same tokens"] = all(each == chosen[0] for each in chosen)
    return found
