"""The target that a drafter is trained for: what it says and its hidden states, from the library's own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.engine.models.fast_dtype import dtype_on
from slipstream.tokenizer.vocabulary import load_tokenizer, read_json, source_and_revision, tokenizer_file

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TargetStates:
    """What the target computes of tokens [B, T]."""

    last: Tensor
    """[B, T, hidden] behind the final norm."""
    layers: Mapping[int, Tensor]
    """[B, T, hidden] that enter a layer, by its number."""
    logits: Tensor
    """[B, T, vocabulary] of the token behind each."""


class Target:
    """Loaded with safetensors only, in its own type or float32 where this CPU would emulate that."""

    def __init__(self, name: str, device: torch.device = CPU) -> None:
        self.name = name
        self.device = device
        source, revision = source_and_revision(name)
        stored = str(read_json(tokenizer_file(name, "config.json")).get("dtype") or "float32")
        dtype = dtype_on(device, getattr(torch, stored, torch.float32))
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, dtype=dtype, use_safetensors=True
        )
        self.model.to(device).eval().requires_grad_(False)
        self.tokenizer = load_tokenizer(name)
        known = self.model.generation_config.eos_token_id
        ends = known if isinstance(known, list) else [known]
        self.end = [int(ends[0])] if ends[0] is not None else []
        """The token that ends a text, if there is one."""

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(self, text: str, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A prompt as it is, or messages in the target's own chat template."""
        if not messages:
            return list(self.tokenizer.encode(text).ids)
        source, revision = source_and_revision(self.name)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))

    @torch.no_grad()
    def read(self, tokens: Tensor, layers: Sequence[int] = ()) -> TargetStates:
        """One pass over rows of text, int64 [B, T] on the target's device."""
        found = self.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden = found.hidden_states
        return TargetStates(hidden[-1], {each: hidden[each] for each in layers}, found.logits)

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], length: int, temperature: float, seed: int) -> list[list[int]]:
        """Up to `length` tokens behind each prompt, with the token that ends the text; sampled, or greedy at 0."""
        longest = max(len(each) for each in prompts)
        rows = [[0] * (longest - len(each)) + each for each in prompts]
        seen = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
        tokens, mask = (torch.tensor(each, device=self.device) for each in (rows, seen))
        torch.manual_seed(seed)
        chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        end = self.end[0] if self.end else None
        found = self.model.generate(
            input_ids=tokens, attention_mask=mask, max_new_tokens=length, pad_token_id=end or 0, **chosen
        )
        answers = []
        for row in found[:, longest:].tolist():
            answers.append(row[: row.index(end) + 1] if end is not None and end in row else row)
        return answers
