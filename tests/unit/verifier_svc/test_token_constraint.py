"""What a session's tokens forbid to follow, at each node by the path to it: stop tokens before the least length, the
last token of a bad word, and reasoning beyond its limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verifier_svc.grammar.token_constraint import ReasoningBound, TokenConstraint, TokenRules

STOPS = (3, 9)
SIZE = 20
LEAST = TokenRules(SIZE, min_length=5, stop_token_ids=STOPS)
BEGIN, END = 7, 8
TOKENS = st.lists(st.integers(0, 4), max_size=6)


def forbidden(constraint: TokenConstraint, path: Sequence[int]) -> set[int]:
    mask = constraint.after(tuple(path))
    if mask is None:
        return set()
    return set(np.flatnonzero(np.unpackbits(mask, count=SIZE, bitorder="little") == 0).tolist())


def constraint(rules: TokenRules, tokens: list[int], prompt_length: int, *, drawn: bool = False) -> TokenConstraint:
    return TokenConstraint(rules, tokens, prompt_length, drawn=drawn)


def test_stop_tokens_are_masked_until_the_length_is_reached_along_each_path() -> None:
    tokens = [1, 2, 3]
    least = constraint(LEAST, tokens, 1)
    assert forbidden(least, ()) == forbidden(least, (7,)) == {3, 9}
    assert forbidden(least, (7, 7)) == set()
    tokens.append(4)
    assert forbidden(least, ()) == {3, 9} and forbidden(least, (7,)) == set()
    long, short = (least.beside(text, 1, lambda: None) for text in ([1] * 5, [1]))
    assert forbidden(long, ()) == set() and forbidden(short, (1, 1)) == {3, 9}


def test_a_candidate_that_cannot_be_chosen_has_no_place_in_the_tree() -> None:
    coupled = constraint(LEAST, [1, 2, 3], 1)
    assert not coupled.admits((), 3) and not coupled.admits((7,), 9) and coupled.admits((7, 7), 9)
    assert coupled.admits((), 7)
    drawn = constraint(LEAST, [1, 2, 3], 1, drawn=True)
    assert drawn.admits((), 3) and not drawn.admits((3,), 7) and drawn.admits((7, 8), 3)


@given(
    prompt=TOKENS, output=TOKENS, path=TOKENS, words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4)),
)  # fmt: skip
def test_a_bad_word_cannot_be_completed_behind_the_output(
    prompt: list[int], output: list[int], path: list[int], words: list[list[int]]
) -> None:
    """As vLLM has it (`vllm/v1/sample/ops/bad_words.py`): its rule, over the whole text."""
    rules = TokenRules(SIZE, bad_words=[tuple(word) for word in words])
    bad = constraint(rules, [*prompt, *output], len(prompt))
    past = [*output, *path]
    expected = {
        word[-1] for word in words if len(word) <= len(past) + 1 and past[len(past) + 1 - len(word) :] == word[:-1]
    }
    assert forbidden(bad, path) == expected
    assert all(bad.admits(tuple(path), token) == (token not in expected) for token in range(SIZE))


def test_reasoning_ends_with_its_limit_and_is_free_behind_its_mark() -> None:
    rules = TokenRules(SIZE, reasoning=ReasoningBound(2, BEGIN, END))
    alone = set(range(SIZE)) - {END}
    tokens = [1, BEGIN]
    bound = constraint(rules, tokens, 2)
    assert forbidden(bound, ()) == forbidden(bound, (1,)) == set()
    assert forbidden(bound, (1, 2)) == forbidden(bound, (1, 2, 3)) == alone
    assert (
        forbidden(bound, (1, END)) == forbidden(bound, (1, 2, END)) == forbidden(bound, (END, BEGIN, 1, 1, 1)) == set()
    )
    assert bound.admits((1,), 2) and bound.admits((1, 2), END) and not bound.admits((1, 2), 5)
    tokens.append(1)
    bound.commit([1])
    assert forbidden(bound, ()) == set() and forbidden(bound, (2,)) == alone


@given(
    prompt=st.lists(st.integers(5, 9), max_size=4), text=st.lists(st.integers(5, 9), max_size=9), cut=st.integers(0, 9)
)
def test_committed_and_candidate_tokens_forbid_the_same(prompt: list[int], text: list[int], cut: int) -> None:
    """A session that is opened again, one that committed, and candidates: the same tokens forbid the same."""
    rules = TokenRules(SIZE, reasoning=ReasoningBound(2, BEGIN, END))
    written, path = text[:cut], text[cut:]
    opened = constraint(rules, [*prompt, *written], len(prompt))
    grown = constraint(rules, list(prompt), len(prompt))
    grown.commit(written)
    assert forbidden(opened, path) == forbidden(grown, path) == forbidden(constraint(rules, prompt, len(prompt)), text)


def test_a_prompt_that_closed_its_reasoning_has_none() -> None:
    rules = TokenRules(SIZE, reasoning=ReasoningBound(0, BEGIN, END))
    assert forbidden(constraint(rules, [BEGIN, 1, END], 3), (1, 1)) == set()
    assert forbidden(constraint(rules, [1, END, BEGIN], 3), ()) == set(range(SIZE)) - {END}
    assert forbidden(constraint(rules, [1], 1), (5, BEGIN)) == set(range(SIZE)) - {END}
