"""The kernel that rules tokens out of an exponential race: what is drawn is what every token's score decides."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.engine.kernels import race
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.sampler import coupled_sampling, torch_noise
from slipstream.speculation.noise import Purpose

WIDTHS = (1, 7, 8, 9, 511, 512, 513, 1040, 49_152)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if find_kernels() is None:
        pytest.skip("no compiled kernels for this CPU")


def logits(width: int, spread: float) -> torch.Tensor:
    rows = spread * torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    rows[1] = 0.0  # all are alike
    rows[2, 1:] = -math.inf
    rows[3, : width // 2] = -math.inf
    rows[4, 0] = 80.0
    return rows


def scored(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Winners [R] by the score of every token in float64, ties to the lowest id."""
    shifted = rows - rows.amax(dim=-1, keepdim=True)
    token_ids = torch.arange(rows.shape[1])
    return (shifted.double() + torch_noise.gumbel(keys[:, None], token_ids)).argmax(dim=-1)


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_drawn_tokens_have_the_best_score_of_all_tokens(width: int, spread: float) -> None:
    rows = logits(width, spread)
    for seed in range(2 if width > 10_000 else 20):
        keys = torch_noise.keys([seed] * len(rows), list(range(len(rows))), Purpose.COUPLED)
        found = race.contenders(rows - rows.amax(dim=-1, keepdim=True), keys)
        assert found is not None and len(found[0]) < 8 * len(rows)
        chosen, broken = coupled_sampling.choose(rows, [False] * len(rows), [seed] * len(rows), list(range(len(rows))))
        assert not broken.any()
        assert torch.equal(chosen, scored(rows, keys))


def test_without_room_for_all_that_may_win_the_choice_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = logits(513, 1.0)
    seeds, positions = [5] * len(rows), list(range(len(rows)))
    expected = coupled_sampling.choose(rows, [False] * len(rows), seeds, positions)[0]
    monkeypatch.setattr(race, "ROOM", 0)
    keys = torch_noise.keys(seeds, positions, Purpose.COUPLED)
    assert race.contenders(rows - rows.amax(dim=-1, keepdim=True), keys) is None
    assert torch.equal(coupled_sampling.choose(rows, [False] * len(rows), seeds, positions)[0], expected)


def test_rows_of_what_is_no_number_are_broken_and_the_others_drawn() -> None:
    rows = logits(64, 2.0)
    expected = coupled_sampling.choose(rows, [False] * len(rows), [1] * len(rows), list(range(len(rows))))[0]
    rows[5, 3], rows[6, 9], rows[7] = math.nan, math.inf, -math.inf
    chosen, broken = coupled_sampling.choose(rows, [False] * len(rows), [1] * len(rows), list(range(len(rows))))
    assert broken.tolist() == [False] * 5 + [True] * 3 + [False]
    assert chosen[5:8].tolist() == [-1, -1, -1]
    whole = [0, 1, 2, 3, 4, 8]
    assert torch.equal(chosen[whole], expected[whole])
