"""The bytes that a pass cannot do without reading."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from benchmarks import floor
from benchmarks.processes import MODELS


def test_every_matrix_counts_once_and_the_tied_embeddings_as_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "INFLATED", MODELS / "target")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target")
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    head = model.get_output_embeddings().weight.numel()
    for dtype, quantisation, size in (
        ("float32", "", 4 * matrices),
        ("bfloat16", "", 2 * matrices),
        ("bfloat16", "int8", matrices + head),  # the head stays in bf16
        ("float32", "int8-dynamic", matrices),
    ):
        assert floor.weight_bytes(dtype, quantisation) == (matrices, size)
