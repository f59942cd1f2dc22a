"""docs/http.md names each field that requests may have, under what happens to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.api.anthropic.fields import MessageRequest
from gateway.api.openai import fields
from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.completions import CompletionRequest
from gateway.api.openai.response_fields import ResponseRequest

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "http.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and re.search("refused by name|likewise", line)]
REQUESTS = (CompletionRequest, ChatRequest, ResponseRequest, MessageRequest)
OPENAIS = {
    *(
        "model",
        "prompt",
        "messages",
        "input",
        "instructions",
        "system",
        "tools",
        "include",
        "background",
        "text",
        "thinking",
    ),
    *("max_output_tokens", "frequency_penalty", "presence_penalty", "reasoning", "stop_sequences", "documents"),
    "thinking",
}
"""Fields with the meaning that their API gives them, of which the page has nothing to say by this name."""


def names(line: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)", line))


def test_fields_refused_by_name_are_exactly_those_of_the_documents_table() -> None:
    told = set().union(*map(names, ROWS)) - {"field_not_served", "false"}
    served_elsewhere = {"suffix", "best_of"}  # refused by completions themselves
    known = {
        name if not name.startswith("guided_") or name == "guided_decoding" else "guided_" for name in fields._INSTEAD
    }
    assert told - served_elsewhere == known


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.__name__)
def test_every_field_of_a_request_is_on_the_page(request_: type[fields.RequestFields]) -> None:
    written = set(re.findall(r"[a-z_]+", PAGE))
    assert set(request_.model_fields) - OPENAIS - written == set()
