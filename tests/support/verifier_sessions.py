"""Sessions as a verifier keeps them, for tests of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.session import Session, SessionRequest


class Sent:
    """A gateway's stream: `receive` gets what is sent."""

    def __init__(self, receive: Callable[[Any], object]) -> None:
        self.send = self.end = receive


def new_session(tokens: Sequence[int], **changes: Any) -> Session:
    """A greedy session with these tokens as its prompt, an empty tree and up to 8 candidates a step; `changes` go to
    its request or to its state."""
    asked: dict[str, Any] = {
        "id": "one",
        "number": 1,
        "epoch": 1,
        "sampling": SamplingParams(temperature=0.0),
        "prompt_length": len(tokens),
        "max_length": 100,
        "stop_token_ids": frozenset(),
        "max_draft_tokens": 8,
    }
    state: dict[str, Any] = {"tokens": list(tokens), "credit": None, "tree": CandidateTree(tokens), "history": None}
    of_request = {each.name for each in fields(SessionRequest)}
    for name, value in changes.items():
        (asked if name in of_request else state)[name] = value
    return Session(SessionRequest(**asked), **state)
