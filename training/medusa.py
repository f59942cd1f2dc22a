"""Medusa's heads: cross-entropy of each head to the token that it stands for (Cai et al. 2024, arXiv 2401.10774)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from slipstream.proposers.medusa_heads import MedusaHeads
from slipstream.proposers.weights import output_weight
from training.corpus import TrainingBatch
from training.folder import replacing
from training.request import TrainRequest
from training.target import Target, TargetStates
from training.trained_drafter import rank_of, reached, shifted


class _Module(nn.Module):
    def __init__(self, output: Tensor, heads: int, own_outputs: bool) -> None:
        super().__init__()
        width = output.shape[1]
        # Zero blocks: a head starts as the target's own output.
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(width, width)) for _ in range(heads)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(heads)])
        count = heads if own_outputs else 1
        self.outputs = nn.ParameterList([nn.Parameter(output.clone(), requires_grad=own_outputs) for _ in range(count)])

    def heads(self) -> MedusaHeads:
        """Heads that the proposer computes with, over these very tensors."""
        outputs = list(self.outputs) if len(self.outputs) > 1 else [self.outputs[0]] * len(self.weights)
        blocks: list[list[tuple[Tensor, Tensor | None]]] = [
            [(weight, bias)] for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return MedusaHeads(blocks, outputs, outputs[0].shape[0])


class Medusa:
    layers: tuple[int, ...] = ()
    passes = 1

    def __init__(self, request: TrainRequest, target: Target) -> None:
        self.depth, self._target, self._decay = request.depth, target.name, request.decay
        own = request.own_outputs and request.depth > 1
        self.module = _Module(output_weight(target.name).float(), request.depth, own)
        self.layout = "Medusa-1" if own else "TGI's second layout of Medusa, on the target's output"

    def calibrate(self, batch: TrainingBatch, states: TargetStates) -> None:
        """It has no scales to fit."""

    def loss(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        assert batch.learned is not None
        total = states.last.new_zeros((), dtype=torch.float32)
        for head, weight in enumerate(self._decay**depth for depth in range(self.depth)):
            roots = shifted(batch.learned, 2 + head, False)
            goals = shifted(batch.tokens, 2 + head, 0)[roots]
            if len(goals):
                found = self.module.heads().logits_of(head, states.last[roots].float())
                total = total + weight * cross_entropy(found.float(), goals)
        return total

    def ranks(self, batch: TrainingBatch, states: TargetStates) -> Tensor:
        heads, found = self.module.heads(), []
        for head in range(self.depth):
            logits = heads.logits_of(head, states.last.float())
            found.append(reached(rank_of(logits.float(), shifted(batch.tokens, 2 + head, 0)), batch, head))
        return torch.stack(found)

    def one_pass(self) -> None:
        weight = self.module.weights[0]
        self.module.heads().logits(weight.new_zeros(1, weight.shape[0])).topk(10)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        tensors: dict[str, Tensor] = {}
        for head, (weight, bias) in enumerate(zip(self.module.weights, self.module.biases, strict=True)):
            tensors |= {f"{head}.0.linear.weight": weight, f"{head}.0.linear.bias": bias}
            if len(self.module.outputs) > 1:
                tensors[f"{head}.1.weight"] = self.module.outputs[head]
        config = {
            "medusa_num_heads": self.depth,
            "medusa_num_layers": 1,
            "base_model_name_or_path": self._target,
            "medusa_rank_accuracy": accuracy,
        }
        with replacing(folder) as fresh:
            stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
            save_file(stored, fresh / "medusa_lm_head.safetensors")
            (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
