"""A model that writes one tool call and never closes it."""

from __future__ import annotations

from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer
from slipstream.v1 import types_pb2
from tests.e2e.conftest import ROOT
from tests.support.scripted_verifier import ScriptedVerifier

TARGET = ROOT / "models" / "target"
SCRIBE = "scribe"
TOOL_CALL = '<tool_call>{"name": "look", "arguments": {"path": "'
CHARACTERS = 200_000


def scribe() -> ScriptedVerifier:
    """With the shipped target's tokens, in larger steps than any model takes."""
    tokenizer = load_tokenizer(str(TARGET))
    ids = tokenizer.encode(TOOL_CALL + "x y " * (CHARACTERS // 4), add_special_tokens=False).ids
    model = types_pb2.ModelInfo(
        name=SCRIBE,
        vocabulary_size=4096,
        vocabulary_fingerprint=fingerprint(tokenizer),
        max_length=len(ids) + 1000,
        eos_token_ids=[0],
    )
    return ScriptedVerifier(model, ids, per_round=64)
