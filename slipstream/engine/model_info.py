"""The description of a model that its worker reports; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    """The folder's name or the hub id, without a revision."""
    revision: str
    """The hub commit, or `local-` and a digest over configuration and weight files' names and sizes."""
    vocabulary_size: int
    """Columns of the logits; padded models have more than their tokenizer has tokens."""
    fingerprint: str
    """The tokenizer's (`slipstream.tokenizer.vocabulary`); models with equal fingerprints share token ids."""
    max_length: int
    """Tokens of prompt and output together."""
    dtype: str
    parameters: int
    eos_token_ids: tuple[int, ...]
    chat_template: str = ""
    """Fingerprint of the chat template (`slipstream.tokenizer.chat_template_source`); empty for none."""
    forward_path: str = ""
    """Which code computes it (`slipstream.engine.models.forward.Forward.path`); empty without a choice of it."""
    forward_notice: str = ""
    """Why a faster path was left out, and what that costs, for people; empty if none was."""
