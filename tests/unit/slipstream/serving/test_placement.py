"""Where `slipstream serve` puts drafters, and how many threads it gives the target."""

from __future__ import annotations

import pytest

from slipstream.serving.options import FleetOptions
from slipstream.serving.placement import Placement, place

MODEL, BOTH, ALL = ("model",), ("model", "suffix"), ("model", "suffix", "eagle")


@pytest.mark.parametrize(
    ("cores", "methods", "asked", "threads", "own_cores", "expected"),
    [
        (1, MODEL, None, 0, True, Placement(MODEL, 1)),
        (2, BOTH, None, 0, True, Placement(BOTH, 2)),
        (4, MODEL, None, 0, True, Placement((), 3)),
        (4, BOTH, None, 0, True, Placement(("suffix",), 3)),
        (4, ("suffix",), None, 0, True, Placement(("suffix",), 4)),
        (4, ("eagle",), None, 0, True, Placement(("eagle",), 4)),
        (2, (), None, 0, True, Placement((), 2)),
        (2, BOTH, None, 0, False, Placement(("suffix",), 1)),
        (2, ALL, False, 0, True, Placement(("eagle",), 1)),
        (8, BOTH, True, 0, True, Placement(BOTH, 8)),
        (8, BOTH, None, 3, True, Placement(("suffix",), 3)),
    ],
)
def test_lookups_draft_in_the_verifier_models_there_on_few_cores_and_what_is_asked_for_comes_first(
    cores: int, methods: tuple[str, ...], asked: bool | None, threads: int, own_cores: bool, expected: Placement
) -> None:
    assert place(cores, methods, asked, threads, own_cores) == expected


@pytest.mark.parametrize("asked", [None, True])
def test_a_draft_model_on_vllm_has_a_process_of_its_own(asked: bool | None) -> None:
    assert FleetOptions().methods_on_vllm(ALL) == set()
    on_vllm = FleetOptions(draft_engine="vllm").methods_on_vllm(ALL)
    assert on_vllm == {"model"}
    assert place(2, ALL, asked, 0, True, on_vllm) == Placement(("suffix", "eagle"), 1)
