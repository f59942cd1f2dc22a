"""The target that a drafter is trained for: its texts and hidden states, computed by the engine that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from slipstream.engine.engine import Engine, HiddenRequest
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.errors import FailedPrecondition
from slipstream.proposers.weights import output_weight
from slipstream.tokenizer.vocabulary import (
    check_folder,
    eos_token_ids,
    is_local,
    load_tokenizer,
    source_and_revision,
    tokenizer_file,
)

CPU = torch.device("cpu")
MOST_ROWS = 2048
"""Tokens of a pass over texts: more take no less time each, and more memory."""
TOLERANCE = 0.02
"""Most by which a row of logits that is made here may differ from the engine's, relative to its spread."""


@dataclass(frozen=True)
class TargetStates:
    """The target's states of tokens [B, T]; zeros for tokens that it did not read."""

    last: Tensor
    """[B, T, hidden] behind the final norm."""
    layers: Mapping[int, Tensor]
    """[B, T, hidden] that enter a layer, by its number."""

    def on(self, device: torch.device, dtype: torch.dtype) -> TargetStates:
        return TargetStates(
            self.last.to(device, dtype), {number: rows.to(device, dtype) for number, rows in self.layers.items()}
        )


class Target:
    """Computed as a verifier computes it, so that a drafter learns from the states that it will be served with. Its
    weights are loaded when the first text is read or written: a run that goes on has the states in a file."""

    def __init__(
        self, name: str, device: torch.device = CPU, kv_tokens: int = 4 * MOST_ROWS, dtype: str = "auto"
    ) -> None:
        """`kv_tokens`: room for the texts that are written or read at once. Raises NotFound for a folder without a
        model, and for a hub id that is neither in the cache nor to be had."""
        check_folder(name)
        if not is_local(name):
            tokenizer_file(name, "config.json")  # the library would raise what no command explains
        self.name = name
        self.device = device
        self._kv_tokens, self._dtype = kv_tokens, dtype
        source, revision = source_and_revision(name)
        self.config: Any = AutoConfig.from_pretrained(source, revision=revision).get_text_config()
        self.tokenizer = load_tokenizer(name)
        self.end = list(eos_token_ids(name)[:1])
        """The token that ends a text, if there is one."""
        self.output = output_weight(name).to(device, self.dtype)
        """[vocabulary, hidden] of the layer that makes logits."""

    @cached_property
    def engine(self) -> Engine:
        """Raises what `open_engine` does."""
        engine = open_engine(self.name, self._dtype, self._kv_tokens, device=str(self.device))
        engine.batch_invariant = False  # a text for training need not be the one that is served
        return engine

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that the target is computed in."""
        named = self.engine.model.dtype.rpartition("/")[2] if self._dtype == "auto" else self._dtype
        found = getattr(torch, named, torch.float32)
        return found if isinstance(found, torch.dtype) else torch.float32

    @property
    def vocabulary(self) -> int:
        return self.output.shape[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest text that it was made for."""
        return int(getattr(self.config, "max_position_embeddings", 0) or 1 << 20)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, text: str, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A prompt as it is, or messages in the target's own chat template."""
        if not messages:
            return list(self.tokenizer.encode(text).ids)
        if not hasattr(self, "_chat"):
            source, revision = source_and_revision(self.name)
            self._chat = AutoTokenizer.from_pretrained(source, revision=revision)
        return list(self._chat.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))

    @torch.inference_mode()
    def read(self, rows: Sequence[Sequence[int]], layers: Sequence[int] = ()) -> TargetStates:
        """The states of each text, padded to the longest: one packed pass for up to MOST_ROWS tokens of texts."""
        request, longest = HiddenRequest(tuple(layers)), max(len(row) for row in rows)
        found: dict[int, Tensor] = {}
        for part in _parts([len(row) for row in rows]):
            segments = [Segment(self.engine.kv.begin_unshared(len(rows[at])), list(rows[at])) for at in part]
            hidden = self.engine.forward(segments, request).hidden
            assert hidden is not None
            for each in segments:
                self.engine.kv.close(each.sequence)
            for number, states in ((-1, hidden.last), *hidden.layers.items()):
                if number not in found:
                    found[number] = states.new_zeros(len(rows), longest, states.shape[-1])
                begin = 0
                for at in part:
                    found[number][at, : len(rows[at])] = states[begin : begin + len(rows[at])]
                    begin += len(rows[at])
        # Tensors of an inference mode cannot be saved for a backward pass; clones made outside of it can.
        with torch.inference_mode(False):
            kept = {number: states.clone() for number, states in found.items()}
        return TargetStates(kept.pop(-1), kept)

    def logits(self, last: Tensor, ids: Tensor | None = None) -> Tensor:
        """float32 [..., vocabulary] of hidden states behind the final norm, or [..., ids] of these tokens alone."""
        weight = self.output if ids is None else self.output[ids]
        found = (last.to(weight.dtype) @ weight.T).float()
        config = self.config
        if scale := getattr(config, "logit_scale", None):
            found = found * scale
        if divisor := getattr(config, "logits_scaling", None):
            found = found / divisor
        if cap := getattr(config, "final_logit_softcapping", None):
            found = torch.tanh(found / cap) * cap
        return found

    def check_logits(self) -> None:
        """Raises FailedPrecondition for a family whose logits are made of the last state in a way not known here."""
        tokens = [token % self.vocabulary for token in (3, 1, 4, 1, 5)]
        segment = Segment(self.engine.kv.begin_unshared(len(tokens)), tokens)
        output = self.engine.forward([segment], HiddenRequest())
        self.engine.kv.close(segment.sequence)
        assert output.hidden is not None
        wanted, made = output.logits[0], self.logits(output.hidden.last[-1])
        far = float((made[: len(wanted)] - wanted[: len(made)]).abs().max())
        if not far <= TOLERANCE * float(wanted.max() - wanted.min()):
            raise FailedPrecondition(
                f"the logits of {self.name} ({self.config.model_type}) are no product of its last hidden states and "
                "its output layer; no drafter can be trained for it here.",
                reason="TARGET_UNFIT",
            )


def _parts(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of texts of these lengths, in groups of up to MOST_ROWS tokens; a longer text is a group of its own."""
    parts: list[list[int]] = []
    free = 0
    for at, length in enumerate(lengths):
        if length > free:
            parts.append([])
            free = max(MOST_ROWS, length)
        parts[-1].append(at)
        free -= length
    return parts
