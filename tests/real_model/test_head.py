"""The bounds by which a verifier judges a head at its start, on the head that was trained for the real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.head_floor import accuracies
from slipstream.engine.factory import open_engine
from slipstream.proposers.base import HiddenNeed
from slipstream.proposers.eagle_checkpoint import load_head
from slipstream.proposers.head_file import read_target
from tests.real_model.conftest import ROOT
from verifier_svc.config import VerifierConfig
from verifier_svc.hidden_feed import HiddenFeed
from verifier_svc.sources.local_drafters import GOOD_ACCURACY, OWN_LENGTH, OWN_TEXTS


@torch.inference_mode()
def test_accuracy_distinguishes_a_head_from_itself_with_its_layers_reversed(smollm2: Path) -> None:
    """The first one is served without a warning, the other one with one: it is above the least."""
    torch.set_num_threads(1)
    head = load_head(str(ROOT / "models" / "smollm2-eagle"), read_target(str(smollm2)), torch.float32)
    engine, layers = open_engine(str(smollm2), "float32", kv_tokens=4096), head.config.layers
    need = HiddenNeed(tuple(sorted(set(layers))), every_row=True)
    texts = HiddenFeed(engine).write_texts(need, engine.model.eos_token_ids[0], OWN_TEXTS, OWN_LENGTH)
    right, turned = (sum(accuracies(head, texts, order, OWN_LENGTH)) / OWN_TEXTS for order in (layers, layers[::-1]))
    assert right > GOOD_ACCURACY > turned > VerifierConfig(model=str(smollm2)).min_head_accuracy
    assert right == pytest.approx(0.35, abs=0.04)
