"""The verifier's executor on the real model: candidates, pieces of prompts and batches change no token."""

from __future__ import annotations

import random
from itertools import cycle, product
from pathlib import Path

import pytest

from benchmarks.equality_steps import KINDS, Text, compare
from tests.real_model.prompts import OWN, asked, encoded
from verifier_svc.execution.embedded import EmbeddedExecutor

FEW, MANY = 16, 64
"""Tokens of each text in the short and in the long form."""
LONG_PROMPTS, AT_ONCE = 200, 20
LONGEST = 900
"""Tokens of a prompt that are kept, its last ones."""
SHORT_KINDS = ("greedy", "T = 0.8")


def check_that_candidates_change_nothing(executor: EmbeddedExecutor, texts: list[Text]) -> None:
    """Two texts are decoded alone and the rest in one batch, then all under random trees, pieces and batches."""
    again = compare(executor, texts, random.Random(1), alone=2)
    assert again.accepted > 0
    assert not again.different, f"{len(again.different)} of {len(texts)} texts differ: {sorted(again.different)}"


def test_candidates_pieces_and_batches_change_no_token(executor: EmbeddedExecutor, smollm2: Path) -> None:
    prompts = encoded(smollm2, OWN)
    texts = [Text(SHORT_KINDS[at % 2], prompt, seed=at, length=FEW) for at, prompt in enumerate(prompts)]
    check_that_candidates_change_nothing(executor, texts)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_candidates_pieces_and_batches_change_no_token_of_many_prompts(
    executor: EmbeddedExecutor, smollm2: Path
) -> None:
    """Each of them with each kind of sampling in the type that users get; in turn in float32, which takes three times
    as long."""
    prompts = encoded(smollm2, asked(LONG_PROMPTS))
    slow = executor.model.dtype == "float32"
    asked_for = zip(prompts, cycle(KINDS), strict=False) if slow else product(prompts, KINDS)
    texts = [Text(kind, prompt[-LONGEST:], seed=at, length=MANY) for at, (prompt, kind) in enumerate(asked_for)]
    for first in range(0, len(texts), AT_ONCE):
        check_that_candidates_change_nothing(executor, texts[first : first + AT_ONCE])
