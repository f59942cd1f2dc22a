"""The output beside its prediction: guesses are what stands there next, and the place is found again after edits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.proposers.lookup import LookupProposer
from slipstream.proposers.predicted_output import (
    BEGINNING,
    GRAM,
    WINDOW,
    Alignment,
    HitRates,
    PredictionText,
    TextPosition,
)
from tests.unit.slipstream.proposers.test_lookup import Drafting, chain, session

PROMPT = [7, 8, 9]
NEW = 10**6
"""Tokens from here on stand in no prediction."""
SEEDS = st.integers(0, 2**32)
SYMBOLS = st.lists(st.integers(0, 2), max_size=40)


def guess(text: PredictionText, path: list[int] | None = None) -> int | None:
    grown = text.look_up(path or [], 1)
    return grown[0].token if grown else None


def fed(prediction: list[int], output: list[int]) -> PredictionText:
    text = PredictionText(prediction, len(PROMPT))
    text.read(PROMPT + output)
    return text


@dataclass
class Edited:
    """A text, and for each of its tokens the index in the original, or None for one that is new."""

    tokens: list[int]
    origin: list[int | None]


def edited(original: list[int], chance: random.Random, gap: int) -> Edited:
    """Insertions, deletions and replacements of up to 12 tokens, at least `gap` kept tokens between any two."""
    result, place = Edited([], []), 0
    while place < len(original):
        kept = min(gap + chance.randrange(10), len(original) - place)
        result.tokens += original[place : place + kept]
        result.origin += range(place, place + kept)
        place += kept + chance.choice([0, 0, 1, 3, 12])
        new = chance.choice([0, 1, 2, 12])
        result.tokens += [NEW + chance.randrange(1000) for _ in range(new)]
        result.origin += [None] * new
    return result


@given(SEEDS, st.integers(0, 200))
def test_after_every_edit_the_place_is_found_again_by_the_first_token_that_is_kept(seed: int, length: int) -> None:
    chance = random.Random(seed)
    original = chance.sample(range(NEW), length)
    after = edited(original, chance, gap=GRAM)
    text = PredictionText(original, len(PROMPT))
    text.read(PROMPT)
    for index, (token, origin) in enumerate(zip(after.tokens, after.origin, strict=True)):
        before = after.origin[index - 1] if index else -1
        if origin is not None and before is not None and origin == before + 1:
            assert guess(text) == token
        text.read([token])


@pytest.mark.parametrize("vocabulary", [30, 1000])
def test_in_texts_that_repeat_tokens_a_few_kept_ones_are_enough(vocabulary: int) -> None:
    chance = random.Random(vocabulary)
    late = total = 0
    for _ in range(30):
        original = [chance.randrange(vocabulary) for _ in range(300)]
        after = edited(original, chance, gap=10)
        text = PredictionText(original, 0)
        since = 0
        for index, (token, origin) in enumerate(zip(after.tokens, after.origin, strict=True)):
            before = after.origin[index - 1] if index else -1
            since = since + 1 if origin is not None and before is not None and origin == before + 1 else 0
            if since > GRAM:
                total += 1
                late += guess(text) != token
            text.read([token])
    assert total > 1000
    assert late <= 0.02 * total


def test_a_block_that_moved_is_found_wherever_it_went() -> None:
    original = list(range(1000))
    moved = original[800:850] + original[100:150] + original[20:60]
    wrong = [index for index in range(1, len(moved)) if guess(fed(original, moved[:index])) != moved[index]]
    assert all(index % 50 < GRAM for index in wrong) and len(wrong) <= 3 * GRAM


def test_the_beginning_is_guessed_before_there_is_output_and_nothing_beyond_the_end() -> None:
    assert [node.token for node in fed([1, 2, 3], []).look_up([], 8)] == [1, 2, 3]
    assert fed([1, 2, 3], [1, 2, 3]).look_up([], 8) == []
    assert fed([], []).look_up([], 8) == []


def test_after_a_difference_a_replacement_and_an_insertion_are_both_proposed() -> None:
    grown = fed([1, 2, 3, 4, 5, 6], [1, 2, NEW]).look_up([], 8)
    assert {node.token for node in grown if node.parent == 0} == {4, 3}  # replaced; inserted


@given(SYMBOLS, SYMBOLS, SYMBOLS, st.integers(1, 8))
def test_probabilities_of_a_tree_are_consistent_and_its_size_is_bounded(
    prediction: list[int], output: list[int], path: list[int], count: int
) -> None:
    grown = fed(prediction, output).look_up(path, count)
    assert len(grown) <= count
    shares: dict[tuple[int, ...], float] = {(): 1.0}
    paths: list[tuple[int, ...]] = [()]
    for number, node in enumerate(grown):
        assert 0 <= node.parent <= number and 0 < node.probability < 1
        paths.append((*paths[node.parent], node.token))
        assert paths[-1] not in shares
        shares[paths[-1]] = shares[paths[node.parent]] * node.probability
    assert sum(share for way, share in shares.items() if len(way) == 1) < 1
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@given(SYMBOLS, SYMBOLS, SYMBOLS)
def test_a_path_of_guesses_moves_the_place_as_commits_do(
    prediction: list[int], output: list[int], path: list[int]
) -> None:
    guessed = [node.token for node in fed(prediction, output).look_up(path, 8) if node.parent == 0]
    committed = [node.token for node in fed(prediction, output + path).look_up([], 8) if node.parent == 0]
    assert guessed == committed


@given(SYMBOLS, st.lists(SYMBOLS, max_size=5))
def test_the_place_in_a_prediction_does_not_depend_on_how_the_text_is_split(
    prediction: list[int], pieces: list[list[int]]
) -> None:
    text, tokens = PredictionText(prediction, len(PROMPT)), list[int]()
    for piece in (PROMPT[:1], PROMPT[1:], *pieces):
        text.read(piece)
        tokens += piece
    fresh = fed(prediction, tokens[len(PROMPT) :])
    assert text.look_up([], 4) == fresh.look_up([], 4)


class Counted(list[int]):
    """A prediction that knows how often it was looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("period", [1, 2, 50, 10_000])
def test_the_work_for_a_token_does_not_depend_on_the_predictions_length(period: int) -> None:
    looks = []
    for length in (1000, 10_000):
        prediction = Counted([index % period for index in range(length)])
        alignment, place = Alignment(prediction), TextPosition(run=BEGINNING)
        chance = random.Random(1)
        recent: list[int] = []
        worst = 0
        for _ in range(300):
            recent.append(chance.choice([NEW, chance.randrange(period), chance.randrange(2)]))
            prediction.looks = 0
            place = alignment.follow(place, recent[-GRAM:])
            worst = max(worst, prediction.looks)
        looks.append(worst)
    assert max(looks) <= 2 * WINDOW * (GRAM + 1)


@given(st.floats(0, 1), st.integers(0, 40), SEEDS)
def test_observed_hits_of_a_session_correct_its_hit_rates(rate: float, run: int, seed: int) -> None:
    rates, chance = HitRates(), random.Random(seed)
    for _ in range(400):
        rates.add(run, chance.random() < rate)
    assert rates.rate(run) == pytest.approx(rate, abs=0.25)
    assert 0 < rates.rate(run) < 1


async def test_a_session_brings_its_prediction_and_drafts_ahead_of_commits() -> None:
    one = session(PROMPT)
    one.prediction = (1, 2, 3, 4, 5, 6)
    drafting = Drafting(LookupProposer(lambda s: PredictionText(s.prediction, s.prompt_length)), one)
    drafting.step()
    assert chain(one) == [1, 2, 3, 4, 5, 6]
    one.commit(len(PROMPT), [1, 2, 99])
    drafting.step()
    one.commit(len(PROMPT) + 3, [3])
    drafting.step()
    assert chain(one)[:3] == [4, 5, 6]
