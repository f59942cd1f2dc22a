"""Tokens of reasoning are counted alike however they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.text.answers.formats import HARMONY, NONE, THINK, AnswerFormat
from gateway.text.answers.reasoning_tokens import ReasoningTokens
from gateway.text.detokenizer import TokenDecoder
from slipstream.tokenizer.vocabulary import load_tokenizer
from tests.support.toy_tokenizer import toy_tokenizer

FINAL = "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
CASES = [
    (THINK, "<think>1234</think>12", False, 4),
    (THINK, " \n<think>1234</think>12<think>12</think>", False, 4),
    (THINK, "1234</think>12", True, 4),
    (THINK, "<think>1234</think>12", True, 4),
    (THINK, "12345<think>1234</think>", False, 0),
    (THINK, "1234", False, 0),
    (HARMONY, f"<|channel|>analysis<|message|>1234<|end|>{FINAL}", False, 4),
    (
        HARMONY,
        f"<|channel|>analysis<|message|>12<|end|><|start|>assistant<|channel|>analysis<|message|>34<|end|>{FINAL}",
        False,
        4,
    ),
    (HARMONY, "<|channel|>commentary to=functions.analysis<|message|>1234<|call|>", False, 0),
    (NONE, "<think>1234</think>12", False, 0),
]


@pytest.mark.parametrize(("thoughts", "text", "opened", "wanted"), CASES)
def test_tokens_between_the_marks_are_counted(
    tmp_path: Path, thoughts: str, text: str, opened: bool, wanted: int
) -> None:
    format = AnswerFormat(NONE, thoughts)
    tokenizer = load_tokenizer(str(toy_tokenizer(tmp_path, [*format.marks, "<|return|>"])))
    tokens = tokenizer.encode(text).ids
    for size in (1, 3, len(tokens)):
        counted = ReasoningTokens(format, TokenDecoder(tokenizer), opened=opened)
        for at in range(0, len(tokens), size):
            counted.add(tokens[at : at + size])
        assert counted.count == wanted
