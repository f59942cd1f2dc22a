"""The arithmetic that a verifier on vLLM announces, where a stand-in has what is read of vLLM's core."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.engine.model_info import ModelInfo
from slipstream.engine.models.checkpoint import describe_checkpoint
from slipstream.rpc.proto_conversion import model_to_proto
from tests.support.checkpoints import other_weights, save_checkpoint
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.vllm import engine_core
from verifier_svc.execution.vllm.executor import VLLMExecutor
from verifier_svc.execution.vllm.messages import Graphs, WorkerSettings

FULL = Graphs("full")
Announced = Callable[..., Any]
"""(description, dtype, quantization) -> the ModelInfo that GetModel returns."""


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Announced:
    def announce(described: ModelInfo, dtype: str, quantization: str | None = None, graphs: Graphs = FULL) -> Any:
        spec = type("FullAttentionSpec", (), {"block_size": 16, "tokens_per_state": 1})()
        cache = SimpleNamespace(num_blocks=64, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])

        def answer(method: str, **options: Any) -> Any:
            assert method == "graphs"
            return SimpleNamespace(result=lambda: graphs)

        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=f"torch.{dtype}", quantization=quantization, max_model_len=512),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048),
            additional_config=WorkerSettings("failures"),
        )
        core = SimpleNamespace(
            vllm_config=config,
            scheduler=SimpleNamespace(kv_cache_config=cache),
            model_executor=SimpleNamespace(
                workers=[], output_rank=0, collective_rpc=answer, get_kv_cache_specs=lambda: [{"layer": spec}]
            ),
        )
        monkeypatch.setattr(engine_core, "prepare_vllm", lambda _: None)
        monkeypatch.setattr(engine_core.EngineCore, "_open", lambda *_: core)
        monkeypatch.setattr(engine_core.EngineCore, "_watch", lambda _: None)
        return model_to_proto(VLLMExecutor(VerifierConfig(model="any", engine="vllm"), described).model)

    return announce


def test_the_arithmetic_names_weights_and_type_and_promises_the_distribution_alone(
    announced: Announced, tmp_path: Any
) -> None:
    save_checkpoint("llama", tmp_path / "one")
    described = describe_checkpoint(str(tmp_path / "one"))
    model = announced(described, "bfloat16")
    weights = described.revision.removeprefix("local-")[:12]
    assert model.arithmetic == f"{weights}/bfloat16/vllm"
    assert (model.batch_invariant, model.dtype) == (False, "bfloat16")
    assert announced(described, "float16", "awq").arithmetic == f"{weights}/awq-float16/vllm"


def test_the_arithmetic_differs_for_other_weights_and_not_for_other_settings(
    announced: Announced, tmp_path: Any
) -> None:
    save_checkpoint("llama", tmp_path / "one")
    folders = tmp_path / "one", other_weights(tmp_path / "one", tmp_path / "two")
    one, two = (announced(describe_checkpoint(str(folder)), "bfloat16").arithmetic for folder in folders)
    assert one != two and one.split("/")[1:] == two.split("/")[1:]


def test_graphs_that_vllm_does_not_replay_are_announced_and_warned_of(
    announced: Announced, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint("llama", tmp_path / "one")
    described = describe_checkpoint(str(tmp_path / "one"))
    model = announced(described, "bfloat16")
    assert (model.forward_path, model.forward_notice, caplog.text) == ("full", "", "")
    model = announced(described, "bfloat16", graphs=Graphs("padded", "chains are padded to 0, 1, 2", (0, 1, 2)))
    assert (model.forward_path, model.forward_notice) == ("padded", "chains are padded to 0, 1, 2")
    assert "chains are padded to 0, 1, 2" in caplog.text
