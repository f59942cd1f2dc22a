"""Turns of one conversation meet where their beginning was computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gateway.routing.router import Router
from gateway.routing.verifier_choice import BUSIER, SPARE, STRIDE, PrefixAffinity, prefix_hashes
from slipstream.v1 import types_pb2

TURN = list(range(3 * STRIDE + 5))


def test_a_longer_text_has_the_beginnings_of_a_shorter_one() -> None:
    assert prefix_hashes([*TURN, 1, 2, 3] + [0] * STRIDE, "s")[:3] == prefix_hashes(TURN, "s")
    assert len(prefix_hashes(TURN, "s")) == 3
    assert prefix_hashes(TURN[: STRIDE - 1], "s") == []


@pytest.mark.parametrize("other", [[9, *TURN[1:]], [*TURN[: STRIDE - 1], 7, *TURN[STRIDE:]]])
def test_texts_that_differ_early_share_no_beginning(other: list[int]) -> None:
    assert not set(prefix_hashes(TURN, "s")) & set(prefix_hashes(other, "s"))


def test_texts_of_different_salts_share_none() -> None:
    assert not set(prefix_hashes(TURN, "red")) & set(prefix_hashes(TURN, "blue"))


def test_the_longest_beginning_counts_and_the_oldest_is_forgotten() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity(capacity=4)
    names = prefix_hashes(TURN, "")
    affinity.note(names[:1], "short")
    affinity.note(names[1:], "long")
    assert affinity.find(names) == "long"
    assert affinity.find(names[:1]) == "short"
    affinity.note(prefix_hashes(TURN, "other"), "else")
    assert affinity.find(names[:1]) is None
    assert affinity.find([]) is None


@dataclass(eq=False)
class Place:
    sessions: int
    crowded: bool = False
    ready: bool = True
    weights: str = ""
    arithmetic: str = ""
    present: bool = True
    started_ms: int = 0
    model: types_pb2.ModelInfo = field(default_factory=lambda: types_pb2.ModelInfo(name="m"))


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (Place(4), True),
        (Place(int(BUSIER * 4 + SPARE)), True),
        (Place(int(BUSIER * 4 + SPARE) + 1), False),
        (Place(0, crowded=True), False),
        (Place(0, ready=False), False),
        (Place(0, arithmetic="other"), True),
        (Place(0, weights="older", started_ms=-1), False),
    ],
)
def test_the_verifier_with_the_cached_prefix_is_preferred_unless_it_is_much_busier(known: Place, chosen: bool) -> None:
    router, least, names = Router(), Place(4), prefix_hashes(TURN, "")
    router.verifiers = [least, known]  # type: ignore[list-item]
    router.affinity.note(names, known)  # type: ignore[arg-type]
    assert (router.choose_verifier("m", (), names) is known) == chosen
    assert router.choose_verifier("m", (known,), names) is least  # type: ignore[arg-type]
