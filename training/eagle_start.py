"""A start for EAGLE-3's layer in closed form, from which training goes on.

The target's last state behind token t + 1 is to a good part linear in that behind token t and in the embedding of token
t + 1: least squares over some thousand tokens find a quarter of the tokens after next of SmolLM2-135M before a step of
training. `fc` estimates the last state of token t from the layers' states; most heads attend to their
own pair alone and carry the linear map, so that a pass turns one estimate into the next; the other heads add nothing at
first. The feed-forward layer keeps its random gates, and its last matrix is fitted to what the map leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.engine.engine import HiddenStates
from slipstream.proposers.eagle_head import EagleHead

RIDGE = 0.01
"""Share of the inputs' mean square that is added to it, so that few texts do not decide what they hardly show."""
SHARP = 2 / 3
"""Share of the heads that carry the linear map."""
SELF = 1.5
"""Scale of their queries and keys: a pair's score with itself is then far above that with others."""
RESIDUAL = 0.3
"""Scale of the estimate in the residual stream. Passed on whole it would propose the newest token again."""
ROUNDS = 3
"""Passes whose own estimates the map is fitted to."""


@torch.no_grad()
def start_head(head: EagleHead, states: HiddenStates, embedded: Tensor) -> None:
    """`states` [texts, T] of the target, `embedded` [texts, T, width] of the texts' tokens; float32. Texts shorter than
    T are zeros behind their end. The head's width is the target's."""
    module: Any = head
    layer, last = module.layers[0], states.last
    here = (last.abs().sum(-1) > 0)[:, :-1] & (last.abs().sum(-1) > 0)[:, 1:]
    for number, norm in zip(head.config.layers, module.fc_norm, strict=True):
        norm.weight.copy_(1.0 / _rms(_unit(states.layers[number][here_of(here)])))
    layer.input_layernorm.weight.copy_(1.0 / _rms(_unit(embedded[here_of(here)])))
    scaled = [norm(states.layers[number]) for number, norm in zip(head.config.layers, module.fc_norm, strict=True)]
    features = torch.cat(scaled, dim=-1)
    module.fc.weight.copy_(_least_squares(features[here_of(here)], last[here_of(here)]))
    layer.hidden_norm.weight.fill_(RESIDUAL)
    following = layer.input_layernorm(embedded)[:, 1:]
    estimate, wanted = features @ module.fc.weight.T, last
    inputs, outputs = [], []
    found = last.new_zeros(last.shape[-1], 2 * last.shape[-1])
    for _ in range(ROUNDS):
        # Row t of `estimate` stands for the last state of its token; with the next token's embedding it gives the next.
        normed = layer.hidden_norm(estimate)[:, :-1]
        seen = here[:, -normed.shape[1] :]
        inputs.append(torch.cat((following, normed), dim=-1)[seen])
        outputs.append((wanted[:, 1:] - normed)[seen])
        found = _least_squares(torch.cat(inputs), torch.cat(outputs))
        estimate = normed + torch.cat((following, normed), dim=-1) @ found.T
        following, wanted = following[:, 1:], wanted[:, 1:]
    rows = torch.cat(inputs)
    carried = _carry(layer.self_attn, found, rows)
    attended = rows[:, last.shape[-1] :] + rows @ carried.T
    missing = torch.cat(outputs) - rows @ carried.T
    reached = attended + _fit_feed_forward(layer, attended, missing)
    module.norm.weight.fill_(float(reached.square().mean(-1).sqrt().mean()))


def here_of(pairs: Tensor) -> Tensor:
    """bool [texts, T] of the first tokens of pairs [texts, T - 1]."""
    return torch.nn.functional.pad(pairs, (0, 1))


def _fit_feed_forward(layer: Any, states: Tensor, missing: Tensor) -> Tensor:
    """Adds what is `missing` to the states behind the attention, both [rows, width]: the gates are random, and what
    they open is fitted. Returns what it adds."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    norm.weight.copy_(1.0 / _rms(_unit(states)))
    opened = torch.nn.functional.silu(mlp.gate_proj(norm(states))) * mlp.up_proj(norm(states))
    mlp.down_proj.weight.copy_(_least_squares(opened, missing))
    return mlp.down_proj(opened)  # type: ignore[no-any-return]


def _carry(attention: Any, linear: Tensor, inputs: Tensor) -> Tensor:
    """Gives most heads the map [width, inputs] of their own pair, as nearly as their values' rank allows on inputs like
    these, and nothing to the others. Returns the map that they carry."""
    size, heads = attention.size, attention.q_proj.out_features // attention.size
    kv_heads = attention.k_proj.out_features // size
    sharp, group = max(1, round(SHARP * kv_heads)), heads // kv_heads
    rank = min(sharp * size, *linear.shape)
    # The best map of this rank for these inputs: the outputs' main directions.
    directions = torch.linalg.eigh((inputs @ linear.T).T @ (inputs @ linear.T)).eigenvectors[:, -rank:]
    attention.v_proj.weight[:rank] = directions.T @ linear
    attention.o_proj.weight.zero_()
    basis = torch.linalg.qr(torch.randn(linear.shape[1], sharp * size, device=linear.device)).Q.T
    scale = SELF * (linear.shape[1] / size) ** 0.5
    for head in range(sharp):
        rows = slice(head * size, (head + 1) * size)
        attention.k_proj.weight[rows] = scale / linear.shape[1] ** 0.5 * size**0.5 * basis[rows]
        for member in range(head * group, (head + 1) * group):
            place = slice(member * size, (member + 1) * size)
            attention.q_proj.weight[place] = attention.k_proj.weight[rows]
            part = directions[:, rows]
            attention.o_proj.weight[:, member * size : member * size + part.shape[1]] = part / group
    carried: Tensor = directions @ (directions.T @ linear)
    return carried


def _least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """[outputs, inputs]: the ridge regression of rows on rows."""
    gram = inputs.T @ inputs / len(inputs)
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
    found: Tensor = torch.linalg.solve(gram, inputs.T @ outputs / len(inputs))
    return found.T


def _unit(rows: Tensor) -> Tensor:
    return rows * rows.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def _rms(rows: Tensor) -> Tensor:
    """[columns] of [rows, columns]; not so small that the inverse blows up what hardly ever moves."""
    found = rows.square().mean(0).sqrt()
    return found.clamp(min=float(found.median()) / 16 + 1e-6)
