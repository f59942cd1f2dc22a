"""A grown model computes what the small one did, before it learns on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.errors import FailedPrecondition
from training.settings import Shape
from training.split_model import build_llama, grow, placed

SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=64, context=64)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_grown_model_starts_as_the_small_one(tmp_path: Path, layers: int) -> None:
    small = build_llama(SMALL, 100, seed=1).eval()
    small.save_pretrained(tmp_path)
    large = build_llama(replace(SMALL, layers=layers), 100, seed=2).eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        before = large(tokens).logits
        grow(large, tmp_path)
        assert not torch.equal(before, large(tokens).logits)
        assert torch.equal(large(tokens).logits, small(tokens).logits)


def test_every_old_layer_has_one_place_in_order() -> None:
    for have in range(1, 7):
        for layers in range(have, 13):
            kept = [place for place in placed(have, layers) if place is not None]
            assert kept == list(range(have))


def test_a_model_never_shrinks() -> None:
    with pytest.raises(FailedPrecondition):
        placed(6, 4)


def test_another_width_is_refused(tmp_path: Path) -> None:
    build_llama(SMALL, 100, seed=1).save_pretrained(tmp_path)
    with pytest.raises(FailedPrecondition):
        grow(build_llama(replace(SMALL, feed_forward=96), 100, seed=2), tmp_path)
