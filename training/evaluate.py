"""Evaluation of the pair on held-out files: losses, and the probability that a draft token is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from training.corpus import Windows

COUPLED_SAMPLE = 2048


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out positions. Losses in nats per token; the others are probabilities of acceptance."""

    target_loss: float
    draft_loss: float
    bytes_per_token: float
    greedy_agreement: float
    overlap: float  # 1 - TV at temperature 1
    overlap_cooler: float  # 1 - TV at temperature 0.7
    coupled: float  # drafter-invariant coupling at temperature 1
    coupled_positions: int  # its sample
    positions: int

    def bits_per_byte(self, loss: float) -> float:
        return loss / float(np.log(2.0)) / self.bytes_per_token


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Chance that two Gumbel races with the same noise have the same winner; p, q [V] -> scalar.

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al., arXiv 2408.07978).
    """
    ratio = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    return (1.0 / ratio.sum(dim=1)).sum()


@torch.inference_mode()
def evaluate(target: Any, draft: Any, stream: npt.NDArray[np.int64], bytes_per_token: float, count: int) -> Evaluation:
    """Score both models on `count` windows of 512 tokens from the held-out `stream`."""
    sums = torch.zeros(5, dtype=torch.float64)
    coupled: list[float] = []
    positions = 0
    for goals, p_logs, q_logs in _scored(target, draft, stream, count):
        p, q = p_logs.exp(), q_logs.exp()
        cool_p, cool_q = ((logs / 0.7).softmax(-1) for logs in (p_logs, q_logs))
        sums += torch.stack(
            [
                -p_logs.gather(1, goals[:, None]).sum(),
                -q_logs.gather(1, goals[:, None]).sum(),
                (p_logs.argmax(-1) == q_logs.argmax(-1)).float().sum(),
                torch.minimum(p, q).sum(),
                torch.minimum(cool_p, cool_q).sum(),
            ]
        ).double()
        positions += goals.shape[0]
        for row in range(0, goals.shape[0], max(1, goals.shape[0] * count // COUPLED_SAMPLE)):
            coupled.append(float(coupled_acceptance(*_most_likely(p[row], q[row]))))
    target_loss, draft_loss, agreement, overlap, cooler = (float(value) for value in sums / positions)
    mean_coupled = float(np.mean(coupled))
    return Evaluation(
        target_loss, draft_loss, bytes_per_token, agreement, overlap, cooler, mean_coupled, len(coupled), positions
    )


def _scored(
    target: Any, draft: Any, stream: npt.NDArray[np.int64], count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per window: goals [T], log p [T, V], log q [T, V] in fp32."""
    windows = Windows(stream, length=min(512, (len(stream) - 2) // 2), rows=1, seed=0)
    for step in range(min(count, windows.per_epoch)):
        batch = windows.batch(step)
        logs = [model(input_ids=batch[:, :-1], use_cache=False).logits[0].float() for model in (target, draft)]
        yield batch[0, 1:], logs[0].log_softmax(-1), logs[1].log_softmax(-1)


def _most_likely(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Without tokens below 1e-6 in both: the whole V x V table would cost minutes, the bound falls by < 0.005."""
    keep = torch.maximum(p, q) > 1e-6
    return p[keep], q[keep]
