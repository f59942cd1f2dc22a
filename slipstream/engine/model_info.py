"""The description of a model that its worker reports; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DIGITS = 12
"""Characters of a revision in the name of an arithmetic."""


MOST_CANDIDATES = 256
"""Candidates and window rows of one session in one pass: as many as the compiled kernel of attention has room for."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    """The folder's name or the hub id, without a revision."""
    revision: str
    """The hub commit, or `local-` and a digest over the content of configuration and weights."""
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
    arithmetic: str = ""
    """Name of everything that decides a logit's bits (`slipstream.engine.models.arithmetic`); empty before the weights
    are loaded."""
    batch_invariant: bool = False
    """Whether two models of this arithmetic write the same tokens, whatever else is in their passes."""
    most_candidates: int = MOST_CANDIDATES
    """Candidates and window rows of one session up to which a pass keeps what `batch_invariant` promises."""
    forward_path: str = ""
    """Which code computes it (`slipstream.engine.forward.Forward.path`); empty without a choice of it."""
    forward_notice: str = ""
    """Why a faster path was left out, and what that costs, for people; empty if none was."""
