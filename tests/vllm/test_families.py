"""Families of models beside plain full attention: their texts on vLLM are the embedded engine's, whatever is drafted,
shared and rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from slipstream.engine.factory import open_engine
from slipstream.engine.models.checkpoint import describe_checkpoint
from slipstream.errors import FailedPrecondition
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import WINDOW, save_model
from tests.vllm.conftest import open_executor, settings
from tests.vllm.decoding import VOCABULARY, Case, Decoding, decode, guesses, texts
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.vllm.executor import VLLMExecutor

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


class Family(NamedTuple):
    configuration: str
    settings: dict[str, Any]
    layers: tuple[str, ...]
    """vLLM's kinds of KV cache."""


FULL, WINDOWED = "FullAttentionSpec", "SlidingWindowSpec"
FAMILIES = {
    "mistral": Family("MistralConfig", {"sliding_window": WINDOW}, (WINDOWED,)),
    "gemma3": Family("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": WINDOWS}, (FULL, WINDOWED)),
    "gpt_oss": Family(
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": WINDOWS,
            "max_position_embeddings": 131_072,  # as its rotary embedding, which vLLM takes as published
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        (FULL, WINDOWED),
    ),
    "qwen3_moe": Family("Qwen3MoeConfig", {"num_experts": 8, **EXPERTS}, (FULL,)),
}
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9),
    SamplingParams(temperature=0.9, seed=3, top_k=40, repetition_penalty=1.2),
)


class Served(NamedTuple):
    family: Family
    executor: Any
    embedded: Any
    cases: list[Case]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family = FAMILIES[request.param]
    sizes = {"vocab_size": VOCABULARY, "head_dim": 32}
    folder = str(save_model(family.configuration, sizes | family.settings, tmp_path_factory.mktemp(request.param)))
    executor = open_executor(model=folder, kv_tokens=2048)
    chance = np.random.default_rng(7)
    cases = [
        Case(tuple(chance.integers(0, VOCABULARY, 40 + 9 * index).tolist()), sampling, 48)
        for index, sampling in enumerate(SAMPLINGS)
    ]
    yield Served(family, executor, EmbeddedExecutor(open_engine(folder, "float32", 2048)), cases)
    executor.close()


def test_texts_are_the_embedded_engine_s_whatever_is_drafted(served: Served) -> None:
    """Prompts of several windows and blocks, in chunks; chains of random length, sequences that miss steps."""
    plain = texts(decode(served.embedded, served.cases))
    assert texts(decode(served.executor, served.cases)) == plain
    decoded = decode(served.executor, served.cases, guesses(plain, 0.8), seed=3, skipped=0.2)
    assert texts(decoded) == plain
    accepted, drafted = (sum(getattr(each, name) for each in decoded.values()) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    assert served.executor.kv.blocks_free == served.executor.kv.blocks_total


def test_prefixes_are_shared_and_rolled_back_over_windows_and_blocks(served: Served) -> None:
    case = served.cases[1]
    plain = texts(decode(served.embedded, [case]))
    executor, size = served.executor, served.executor.kv.block_size
    running = Decoding(executor, guesses(plain, 0.8))
    running.open(case)
    while len(running.decoded[case].token_ids) < 2 * WINDOW + 4:
        running.step()
    session = running.live[case]
    reader = executor.kv.begin(session.tokens, case.salt)  # the blocks that are rolled back have another reader
    assert reader.length >= size
    keep = len(case.prompt) + 3  # more than two windows back
    assert len(session.tokens) - keep > 2 * WINDOW
    del session.tokens[keep:], running.decoded[case].token_ids[3:]
    executor.kv.rollback(session.sequence, keep - 1)
    session.computed = keep - 1
    assert texts(running.run()) == plain
    executor.kv.close(reader)
    again = Case(case.prompt, case.sampling, case.tokens)
    running = Decoding(executor, guesses({again: plain[case]}, 0.8))
    running.open(again)
    assert running.live[again].computed >= size  # not read again
    assert running.run()[again].token_ids == plain[case]


def test_blocks_are_vllms_and_hold_the_tokens_that_were_asked_for(served: Served) -> None:
    core, family = served.executor.core, served.family
    assert core.block_size == served.executor.kv.block_size == 32
    assert served.executor.kv.blocks_total * core.block_size == 2048
    assert core.max_length == served.executor.kv.max_length == served.executor.model.max_length <= 2048
    layers = core._executor.get_kv_cache_specs()[0].values()
    assert tuple(sorted({type(each).__name__ for each in layers})) == family.layers


RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba2Config", {"num_heads": 4, "head_dim": 32, "n_groups": 1}),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
}


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_refused_before_weights_are_read(family: str, tmp_path: Path) -> None:
    folder = save_model(*RECURRENT[family], tmp_path)
    model = describe_checkpoint(str(folder))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(FailedPrecondition, match="this target has recurrent layers, whose state cannot be rolled back"):
        VLLMExecutor(settings(model=str(folder), kv_tokens=1024), model)
