"""Every target on its corpus, and on changes of it that are the same in each run."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.changes import changed_bytes, changed_json
from tests.fuzz.targets import TARGETS, corpus

CHANGES = 500, pytest.param(4000, marks=pytest.mark.slow)
"""Of the inputs of each target."""


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", TARGETS)
def test_corpus_and_mutated_inputs_get_typed_answers_and_keep_every_invariant(name: str, changes: int) -> None:
    inputs, draw = list(corpus(name)), random.Random(name)
    assert sum(TARGETS[name](data) for data in inputs) >= 4, "the corpus gets nowhere"
    for _ in range(changes):
        data = draw.choice(inputs)
        data = (changed_json(data, draw) if draw.random() < 0.5 else None) or changed_bytes(data, inputs, draw)
        try:
            TARGETS[name](data)
        except Exception as error:
            raise AssertionError(f"{name} fails on {data!r}") from error
