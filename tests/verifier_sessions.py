"""Sessions as a verifier keeps them, for tests of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.session import Session


def new_session(tokens: Sequence[int], **changes: Any) -> Session:
    """A greedy session with these tokens as its prompt, an empty tree and up to 8 candidates a step."""
    values: dict[str, Any] = {
        "id": "one",
        "number": 1,
        "epoch": 1,
        "sampling": SamplingParams(temperature=0.0),
        "tokens": list(tokens),
        "prompt_length": len(tokens),
        "max_length": 100,
        "stop_token_ids": frozenset(),
        "max_draft_tokens": 8,
        "credit": None,
        "tree": CandidateTree(tokens),
        "history": None,
        "send": lambda reply: None,
    }
    return Session(**values | changes)
