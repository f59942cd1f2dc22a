"""One pass by which two forward functions of a model are compared: random tokens, near and far positions, a tree."""

from __future__ import annotations

import torch

from slipstream.engine.attention.masks import HIDDEN
from slipstream.engine.attention.packed import States, explicit_attention
from slipstream.engine.models.forward import Forward

SEED = 20260
FAR = 1 << 16
"""Positions beyond are not tried."""
BRANCHES = (-1, -1, 0, 0, 2)
"""Parents of the tree's nodes; -1 is the chain's token at position `ROOT`."""
ROOT = 3
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.05, 0.3), torch.float16: (0.01, 0.1)}
"""Of `differences`: the median row's and the worst one's. Another function is off by about 1 where it differs; rounding
moves a row of a trained model by 1 to 2 % in bf16, and now and then one by 10 %."""


class Rehearsal:
    """A step without KV: its rows see each other as far as tree and window let them. The chain's positions double, so
    that the last ones are far; the tree hangs near its beginning."""

    def __init__(self, vocabulary_size: int, length: int, device: torch.device) -> None:
        length = min(length, FAR)
        chain = [*range(ROOT), *(ROOT << power for power in range(64) if ROOT << power < length), length - 1]
        chain = sorted({position for position in chain if position < length})
        root = min(ROOT, len(chain) - 1)
        seen = torch.ones(len(chain) + len(BRANCHES), len(chain) + len(BRANCHES), dtype=torch.bool).tril_()
        positions = list(chain)
        for row, parent in enumerate(BRANCHES, start=len(chain)):
            above = root if parent < 0 else len(chain) + parent
            seen[row, :row] = seen[above, :row]
            positions.append(min(positions[above] + 1, length - 1))
        draw = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(vocabulary_size, (1, len(positions)), generator=draw).to(device)
        self.positions = torch.tensor([positions], device=device)
        self.wanted = torch.arange(len(positions), device=device)
        self._hidden = ~seen.to(device)

    def attend(self, module: object, states: States, extras: dict[str, object]) -> torch.Tensor:
        query, key, value = states
        hidden = self._hidden
        window = extras.get("sliding_window")
        if isinstance(window, int):
            hidden = hidden | (self.positions.T - self.positions >= window)
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, HIDDEN)
        group = query.shape[1] // key.shape[1]
        repeated = (query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1))
        found = explicit_attention(repeated, mask, float(extras["scaling"]), None, None)  # type: ignore[arg-type]
        return found.transpose(1, 2)


@torch.inference_mode()
def rehearse(forward: Forward, rehearsal: Rehearsal) -> torch.Tensor:
    """fp32 [rows, V]."""
    forward.reserve(int(rehearsal.positions.max()) + 1)
    return forward(rehearsal).logits.float()


def differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's distance [R] as a share of how far its logits lie from their mean."""
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    off: torch.Tensor = (found - expected).norm(dim=1) / spread
    return off


def same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the two are one function but for the rounding of `dtype`; NaN agrees with nothing."""
    off = differences(found, expected)
    typical, worst = BOUNDS[dtype]
    return bool(off.median() < typical) and bool((off < worst).all())
