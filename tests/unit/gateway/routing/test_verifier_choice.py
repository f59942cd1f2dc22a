"""Which verifier a session gets where those of its model differ in what decides their numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.verifier_choice import MOST_CHARACTERS, arithmetic_of, least_loaded, newest_weights
from slipstream.v1 import types_pb2


@dataclass(frozen=True)
class Place:
    number: int
    weights: str
    arithmetic: str
    started_ms: int
    sessions: int = 0
    crowded: bool = False


@st.composite
def fleets(draw: st.DrawFn) -> list[Place]:
    counts = st.integers(0, 5)
    return [
        Place(
            number,
            weights := draw(st.sampled_from("abc")),
            f"{weights}/{draw(st.sampled_from(('avx2', 'avx512')))}",
            draw(counts),
            draw(counts),
            draw(st.booleans()),
        )
        for number in range(draw(st.integers(1, 6)))
    ]


@given(fleets(), st.randoms(use_true_random=False))
def test_every_gateway_finds_the_same_weights_newest(fleet: list[Place], chance: object) -> None:
    shuffled = [*fleet]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert newest_weights(fleet) == newest_weights(shuffled)


@given(fleets())
def test_the_newest_weights_are_those_whose_first_verifier_started_last(fleet: list[Place]) -> None:
    newest = newest_weights(fleet)
    ages = {
        weights: min(each.started_ms for each in fleet if each.weights == weights)
        for weights in "abc"
        if any(each.weights == weights for each in fleet)
    }
    assert ages[newest] == max(ages.values())


@given(fleets())
def test_a_verifier_of_older_weights_is_chosen_only_where_all_newest_ones_are_crowded(fleet: list[Place]) -> None:
    newest = newest_weights(fleet)
    found = least_loaded(fleet, newest)
    assert found is not None
    able = [each for each in fleet if each.weights == newest and not each.crowded]
    if able:
        assert found in able and found.sessions == min(each.sessions for each in able)
    elif any(not each.crowded for each in fleet):
        assert not found.crowded


def test_a_verifier_that_restarts_does_not_make_old_weights_new() -> None:
    old = [Place(0, "old", "old", 0), Place(1, "old", "old", 99)]
    assert newest_weights([*old, Place(2, "new", "new", 50)]) == "new"
    assert newest_weights([*old[1:], Place(2, "new", "new", 50)]) == "old"  # rolled back: all of them are newer


def test_arithmetics_of_the_same_weights_share_new_sessions_by_load() -> None:
    fleet = [Place(0, "w", "w/avx2", 0, sessions=3), Place(1, "w", "w/avx512", 9, sessions=4)]
    chosen = []
    for _ in range(6):
        found = least_loaded(fleet, newest_weights(fleet))
        assert found is not None
        chosen.append(found.arithmetic)
        fleet[found.number] = replace(found, sessions=found.sessions + 1)
    assert chosen == ["w/avx2", "w/avx2", "w/avx512", "w/avx2", "w/avx512", "w/avx2"]


def test_without_verifiers_none_is_chosen() -> None:
    assert least_loaded([], newest_weights([])) is None


def test_a_worker_without_an_arithmetic_gets_one_from_its_model_fields() -> None:
    said = {"revision": ("r1", "r2"), "dtype": ("float32", "bfloat16"), "vocabulary_fingerprint": ("v1", "v2")}
    names = [
        arithmetic_of(types_pb2.ModelInfo(**dict(zip(said, values, strict=True))))
        for values in itertools.product(*said.values())
    ]
    assert len(set(names)) == len(names) == 8
    assert arithmetic_of(types_pb2.ModelInfo(revision="r1", arithmetic="n")) == "n"
    assert len(arithmetic_of(types_pb2.ModelInfo(arithmetic="n" * 10_000))) == MOST_CHARACTERS
