"""The network under training: a bf16 Llama that computes, with fp32 master weights that learn; or an fp32 module.

It starts fresh or from a smaller trained model: the two output projections of a new layer are zero, so it adds nothing
to the residual stream, and the grown model computes the small one's function at its first step (Chen, Goodfellow and
Shlens, "Net2Net", 2016, arXiv 1511.05641).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.errors import FailedPrecondition
from training.corpus import END_OF_TEXT_ID
from training.settings import Shape


def build_llama(shape: Shape, vocabulary: int, seed: int) -> Any:
    """A fresh tied-embedding LlamaForCausalLM in bf16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        dtype="bfloat16",
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


class SplitModel:
    """Splits a model into fp32 masters: `embedding` [V, H] (also the head), `matrices` (2-D) and norms."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self.model = model
        self.embedding = model.get_input_embeddings().weight.detach().float().requires_grad_()
        model.get_input_embeddings().weight.requires_grad_(False)
        self._inner = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [parameter.detach().float().requires_grad_() for parameter in self._inner]
        body = model.model
        # A changed window length is a new static graph: kernels for variable lengths would be slower at all lengths.
        self._body: Callable[..., Any] = torch.compile(body, dynamic=False) if compiled else body

    @property
    def matrices(self) -> list[torch.Tensor]:
        return [master for master in self._masters if master.ndim == 2]

    @property
    def others(self) -> list[torch.Tensor]:
        return [self.embedding, *(master for master in self._masters if master.ndim != 2)]

    @property
    def masters(self) -> list[torch.Tensor]:
        return [self.embedding, *self._masters]

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Final hidden states [B * T, H] in bf16 of tokens int64 [B, T]."""
        # The lookup reads the master, so that the gradients of frequent tokens are summed in fp32.
        embedded = torch.nn.functional.embedding(tokens, self.embedding).to(torch.bfloat16)
        states: torch.Tensor = self._body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return states.reshape(-1, states.shape[-1])

    def collect(self) -> None:
        """Move the gradients of the bf16 weights to their masters."""
        for parameter, master in zip(self._inner, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the bf16 model."""
        self.model.get_input_embeddings().weight.copy_(self.embedding)
        for parameter, master in zip(self._inner, self._masters, strict=True):
            parameter.copy_(master)

    @torch.no_grad()
    def restore(self, masters: list[torch.Tensor]) -> None:
        """Take over the masters of a checkpoint."""
        for master, saved in zip(self.masters, masters, strict=True):
            master.copy_(saved)
        self.publish()


class ModuleLearner:
    """A module in fp32, whose parameters are their own masters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]

    @property
    def masters(self) -> list[torch.Tensor]:
        return [each for _, each in self._named]

    @property
    def matrices(self) -> list[torch.Tensor]:
        return [each for name, each in self._named if each.ndim == 2 and not _is_table(name)]

    @property
    def others(self) -> list[torch.Tensor]:
        return [each for name, each in self._named if each.ndim != 2 or _is_table(name)]

    def collect(self) -> None:
        """The gradients are where they belong."""

    def publish(self) -> None:
        """The masters compute."""

    @torch.no_grad()
    def restore(self, masters: list[torch.Tensor]) -> None:
        for master, saved in zip(self.masters, masters, strict=True):
            master.copy_(saved)


def _is_table(name: str) -> bool:
    """Whether a matrix has a row for each token: Muon is for the others."""
    return any(part in name for part in ("embed", "lm_head", "outputs"))


SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@torch.no_grad()
def grow(model: Any, folder: Path) -> None:
    """Overwrites fresh `model` with the checkpoint in `folder`. Raises FailedPrecondition for another width."""
    small = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = small.state_dict()
    layers, have = model.config.num_hidden_layers, small.config.num_hidden_layers
    origins = placed(have, layers)
    for name, parameter in model.state_dict().items():
        origin = name
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            source = origins[int(number)]
            if source is None:
                if rest in SILENT:
                    parameter.zero_()
                continue
            origin = f"model.layers.{source}.{rest}"
        if weights[origin].shape != parameter.shape:
            raise FailedPrecondition(f"{folder} has {origin} of another shape; start from a model of the same width.")
        parameter.copy_(weights[origin])


def placed(have: int, layers: int) -> list[int | None]:
    """For each of `layers` places the old layer that stands there, or None for a new one; new ones evenly between."""
    if have > layers:
        raise FailedPrecondition(f"the start has {have} layers, more than the {layers} asked for.")
    old = [round((index + 1) * layers / have) - 1 for index in range(have)]
    return [old.index(place) if place in old else None for place in range(layers)]
