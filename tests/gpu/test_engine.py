"""Passes, judging and guessing on a GPU: what the CPU computes, without waiting for the GPU between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.torch_engine import TorchEngine
from tests.support.checkpoints import FAMILIES, save_checkpoint
from tests.support.packed_passes import fragment
from tests.support.same_steps import guesses, judged, random_logits, steps

GPU = "cuda:0"


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "library"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_steps_on_a_gpu_equal_those_on_a_cpu(family: str, lean: bool, tmp_path: Path) -> None:
    folder = str(save_checkpoint(family, tmp_path))
    expected = steps(TorchEngine(load_checkpoint(folder, lean=False), 1024, block_size=8))
    engine = TorchEngine(load_checkpoint(folder, device=GPU, lean=lean), 1024, block_size=8)
    for scattered in (False, True):
        if scattered:
            fragment(engine)
        for logits, there in zip(expected, steps(engine), strict=True):
            assert there.is_cuda and torch.allclose(there.cpu(), logits, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_on_a_gpu_are_close_to_those_on_a_cpu(dtype: str, tmp_path: Path) -> None:
    folder = str(save_checkpoint("llama", tmp_path))
    expected = steps(TorchEngine(load_checkpoint(folder, lean=False), 1024, block_size=8))
    found = steps(TorchEngine(load_checkpoint(folder, dtype, GPU), 1024, block_size=8))
    for logits, there in zip(expected, found, strict=True):
        assert (there.cpu() - logits).abs().max() < 0.1 * logits.std()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_a_pass_does_not_wait_for_the_gpu(family: str, tmp_path: Path) -> None:
    engine = TorchEngine(load_checkpoint(str(save_checkpoint(family, tmp_path)), device=GPU), 1024, block_size=8)
    steps(engine)  # what is opened at the first call waits
    with waiting_is_an_error():
        steps(engine)


def test_acceptance_on_a_gpu_equals_acceptance_on_a_cpu() -> None:
    logits = random_logits()
    with torch.inference_mode():
        assert judged(logits.to(GPU)) == judged(logits)


def test_draft_candidates_on_a_gpu_equal_those_on_a_cpu() -> None:
    logits = random_logits()[:4]
    with torch.inference_mode():
        assert guesses(logits.to(GPU)) == guesses(logits)
