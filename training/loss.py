"""Losses: cross-entropy and distillation over a tied output head, a chunk of positions at a time; and divergences.

The gradients of these losses are known in closed form, so the forward pass computes them chunk by chunk while the
logits are still in the cache; a full [positions, vocabulary] fp32 matrix never exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 512


@dataclass(frozen=True)
class Teacher:
    """The target whose distribution the drafter learns: its hidden states [N, H_t] and its output head [V, H_t]."""

    hidden: torch.Tensor
    head: torch.Tensor


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, goals: torch.Tensor, teacher: Teacher | None
    ) -> torch.Tensor:
        weight = head.to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros(head.shape, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            logs = torch.log_softmax(hidden[rows] @ weight.T, dim=-1, dtype=torch.float32)
            if teacher is None:
                total -= logs.gather(1, goals[rows, None]).sum()
                slope = logs.exp_()
                slope[torch.arange(slope.shape[0]), goals[rows]] -= 1.0
            else:
                wanted = torch.log_softmax(teacher.hidden[rows] @ teacher.head.T, dim=-1, dtype=torch.float32)
                goal = wanted.exp()
                total += torch.dot(goal.view(-1), wanted.sub_(logs).view(-1))
                slope = logs.exp_().sub_(goal)
            slope_cast = slope.to(hidden.dtype)
            hidden_grad[rows] = slope_cast @ weight
            head_grad += slope_cast.T @ hidden[rows]
        ctx.save_for_backward(hidden_grad, head_grad)
        ctx.count = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        scale = grads[0] / ctx.count
        return hidden_grad * scale.to(hidden_grad.dtype), head_grad * scale, None, None


def head_loss(
    hidden: torch.Tensor, head: torch.Tensor, goals: torch.Tensor, teacher: Teacher | None = None
) -> torch.Tensor:
    """Mean loss in nats per position of `hidden` [N, H] through `head` [V, H] (fp32).

    Without a teacher: cross-entropy to `goals` int64 [N]. With one: KL(teacher || model) at temperature 1.
    """
    loss: torch.Tensor = _HeadLoss.apply(hidden, head, goals, teacher)  # type: ignore[no-untyped-call]
    return loss


def divergence(draft: torch.Tensor, target: torch.Tensor, kind: str) -> torch.Tensor:
    """[rows] how far the draft's distribution is from the target's, both as logits [rows, tokens].

    `kl`: KL(target || draft). `tv`: the total variation, which is the share of rejected candidates. `lk`: between the
    two, exp(-3 a) KL + (1 - exp(-3 a)) TV with the accepted share a: far off KL has the better slope ("LK losses",
    arXiv 2602.23881).
    """
    draft_logs, target_logs = (each.float().log_softmax(-1) for each in (draft, target))
    wanted = target_logs.exp()
    forward = (wanted * (target_logs - draft_logs)).sum(-1)
    if kind == "kl":
        return forward
    variation = 1.0 - torch.minimum(wanted, draft_logs.exp()).sum(-1)
    if kind == "tv":
        return variation
    share = torch.exp(-3.0 * (1.0 - variation.detach()))
    return share * forward + (1.0 - share) * variation


TeacherLogits = Callable[[slice], torch.Tensor]
"""Float32 logits [rows, tokens] of the target for these positions, for the tokens that the draft's output has."""


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        weights: torch.Tensor,
        teacher: TeacherLogits,
        kind: str,
    ) -> torch.Tensor:
        weight = head.detach().to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        learns = ctx.needs_input_grad[1]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[1], CHUNK):
            rows = slice(start, start + CHUNK)
            wanted = teacher(rows).log_softmax(-1)
            for depth, chunk in enumerate(hidden[:, rows]):
                logs = (chunk @ weight.T).float().log_softmax(-1)
                losses, slope = _losses_and_slopes(logs, wanted, kind)
                share = weights[depth, rows]
                total += torch.dot(losses, share)
                cast = slope.mul_(share[:, None]).to(hidden.dtype)
                hidden_grad[depth, rows] = cast @ weight
                if learns:
                    head_grad += cast.T @ chunk
        ctx.save_for_backward(hidden_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        scaled = head_grad.mul_(grads[0]) if ctx.needs_input_grad[1] else None
        return hidden_grad.mul_(grads[0].to(hidden_grad.dtype)), scaled, None, None, None


def _losses_and_slopes(logs: torch.Tensor, wanted: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(`divergence` [rows], its gradient by the draft's logits [rows, tokens]) of two rows of log-probabilities."""
    p, q = wanted.exp(), logs.exp()
    if kind == "kl":
        return (p * (wanted - logs)).sum(-1), q.sub_(p)
    # The accepted share a = sum min(p, q) grows with q where q < p: da/dlogit = q * (1[q < p] - sum of q where q < p).
    below = torch.where(q < p, q, 0.0)
    variation = 1.0 - torch.minimum(p, q).sum(-1)
    slope = q * below.sum(-1, keepdim=True) - below
    if kind == "tv":
        return variation, slope
    share = torch.exp(-3.0 * (1.0 - variation))
    forward = (p * (wanted - logs)).sum(-1)
    return share * forward + (1.0 - share) * variation, slope.mul_(1.0 - share[:, None]).add_(share[:, None] * (q - p))


def distilled(
    hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor, teacher: TeacherLogits, kind: str
) -> torch.Tensor:
    """The weighted sum of the divergences of `hidden` [depths, positions, H] through `head` [tokens, H] from the
    target's distributions, which are computed once for all depths; `weights` float32 [depths, positions]."""
    loss: torch.Tensor = _Distilled.apply(hidden, head, weights, teacher, kind)  # type: ignore[no-untyped-call]
    return loss
