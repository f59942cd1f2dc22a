"""Where `slipstream serve` puts drafters, and how many threads it gives the target."""

from __future__ import annotations

import pytest

from slipstream.cli.serve import Placement, place


@pytest.mark.parametrize(
    ("cores", "drafters", "asked", "threads", "own_cores", "expected"),
    [
        (1, True, None, 0, True, Placement(True, 1)),
        (2, True, None, 0, True, Placement(True, 2)),
        (4, True, None, 0, True, Placement(False, 3)),
        (2, False, None, 0, True, Placement(False, 2)),
        (2, True, None, 0, False, Placement(False, 1)),
        (2, True, False, 0, True, Placement(False, 1)),
        (8, True, True, 0, True, Placement(True, 8)),
        (8, True, None, 3, True, Placement(False, 3)),
    ],
)
def test_few_cores_draft_in_the_verifier_and_what_is_asked_for_comes_first(
    cores: int, drafters: bool, asked: bool | None, threads: int, own_cores: bool, expected: Placement
) -> None:
    assert place(cores, drafters, asked, threads, own_cores) == expected
