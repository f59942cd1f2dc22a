"""Where things are: device names, and whole steps on a second device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.processes import MODELS
from benchmarks.virtual_gpu import DEVICE, VirtualGPU
from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import open_configured
from slipstream.config import from_env
from slipstream.engine.devices import find_device
from slipstream.engine.factory import open_engine
from slipstream.engine.models.attention_layers import probe_layers
from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.models.packed_library import unpacked
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from tests.support.checkpoints import save_checkpoint
from tests.support.packed_passes import fragment
from tests.support.same_steps import guesses, judged, random_logits, steps
from verifier_svc.acceptance.judge import VerifyInput, judge
from verifier_svc.config import VerifierConfig
from verifier_svc.verifier import open_target


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:x", "", "meta"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="choose auto, cpu, cuda"):
        find_device(name)


def test_auto_is_the_first_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(FailedPrecondition, match="sees 0 GPUs") as found:
        find_device("cuda")
    assert found.value.reason == "DEVICE_MISSING"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(FailedPrecondition, match="cuda:2 is not there"):
        find_device("cuda:2")


def test_an_emulated_engine_has_no_device() -> None:
    assert open_engine("emulated:", device="cpu").kv.blocks_total > 0
    with pytest.raises(InvalidArgument, match="nothing to compute"):
        open_engine("emulated:", device="cuda")


def test_workers_open_models_on_the_device_of_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = str(MODELS / "draft")
    with pytest.raises(FailedPrecondition, match="cuda:1 is not there"):
        open_target(from_env(VerifierConfig, "VERIFIER_", {"VERIFIER_MODEL": model, "VERIFIER_DEVICE": "cuda:1"}))
    with pytest.raises(FailedPrecondition, match="cuda is not there"):
        open_configured(from_env(DrafterConfig, "DRAFTER_", {"DRAFTER_MODEL": model, "DRAFTER_DEVICE": "cuda"}))


def moved(checkpoint: Checkpoint, gpu: VirtualGPU) -> Checkpoint:
    model = checkpoint.forward.model  # type: ignore[attr-defined]
    gpu.move(model)
    return replace(checkpoint, device=DEVICE, layers=probe_layers(model, DEVICE))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_logits_of_steps_on_another_device_are_the_same_without_a_wait(family: str, tmp_path: Path) -> None:
    folder = str(save_checkpoint(family, tmp_path))
    here = TorchEngine(load_checkpoint(folder, lean=False), tokens=1024, block_size=8)
    with unpacked():
        expected, loaded = steps(here), load_checkpoint(folder, lean=False)
    with torch.inference_mode(), VirtualGPU() as gpu, sdpa_kernel(SDPBackend.MATH):
        engine = TorchEngine(moved(loaded, gpu), 1024, block_size=8)
        for scattered in (False, True):
            if scattered:
                fragment(engine)
            gpu.take()
            found = steps(engine)
            assert not gpu.take().waits
            for logits, there in zip(expected, found, strict=True):
                assert there.device == DEVICE and torch.allclose(there.cpu(), logits, atol=1e-5)


def test_acceptance_on_another_device_is_the_same() -> None:
    logits = random_logits()
    expected = judged(logits)
    with torch.inference_mode(), VirtualGPU() as gpu:
        assert judged(logits.to(DEVICE)) == expected
        plain = VerifyInput(Selection(), 0, SamplingParams(temperature=0.0), 6)
        both = logits[:2].to(DEVICE)
        gpu.take()
        judge([plain, plain._replace(first_row=1)], both)
        assert gpu.take().waits == {"tolist": 1}  # greedy decoding asks once, for a token a row
        judge([plain._replace(sampling=SamplingParams(seed=3))], both[:1])
        assert gpu.take().waits == {"copy to the host": 1}


def test_draft_candidates_on_another_device_are_the_same() -> None:
    logits = random_logits()[:4]
    expected = guesses(logits)
    with torch.inference_mode(), VirtualGPU():
        assert guesses(logits.to(DEVICE)) == expected
