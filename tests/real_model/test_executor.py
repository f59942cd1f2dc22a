"""The verifier's executor on the real model: candidates, pieces of prompts and batches change no token."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from benchmarks.equality_steps import KINDS, Text, compare
from tests.real_model.prompts import OWN, asked, encoded
from verifier_svc.execution.embedded import EmbeddedExecutor

FEW, MANY = 16, 120
"""Tokens of each text in the short and in the long form."""
LONG_PROMPTS, AT_ONCE = 200, 20
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
@pytest.mark.timeout(24 * 3600)
def test_candidates_pieces_and_batches_change_no_token_of_many_prompts(
    executor: EmbeddedExecutor, smollm2: Path
) -> None:
    prompts = encoded(smollm2, asked(LONG_PROMPTS))
    texts = [
        Text(kind, prompt[-900:], seed=at, length=MANY) for at, (prompt, kind) in enumerate(product(prompts, KINDS))
    ]
    for first in range(0, len(texts), AT_ONCE):
        check_that_candidates_change_nothing(executor, texts[first : first + AT_ONCE])
