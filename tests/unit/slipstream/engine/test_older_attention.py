"""Families older than the library's attention interface: ALiBi as a product, and what the library's own layers say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.older_attention import OLDER, UNIT, adapt, with_bias
from slipstream.errors import FailedPrecondition
from tests.support.checkpoints import WINDOW, save_checkpoint

LENGTH = 70_000
"""Positions: above what bfloat16 and float16 can count."""
SCALING = 0.125


def adapted(family: str, folder: Path) -> Any:
    save_checkpoint(family, folder)
    attends = "sdpa" if family == "falcon_alibi" else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attends).eval()
    adapt(model)
    return model


def layers(model: Any) -> list[Any]:
    return [each for each in model.modules() if type(each).__module__.endswith("older_attention")]


def library_bias(family: str, heads: int) -> torch.Tensor:
    """[heads, LENGTH]: what the library adds to scores, but for a number that is the same for all keys of a row."""
    name = family.removesuffix("_alibi")
    library: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    ones = torch.ones(1, LENGTH, dtype=torch.int64)
    mpt = name == "mpt"
    made: torch.Tensor = (
        library.build_mpt_alibi_tensor(heads, LENGTH) if mpt else library.build_alibi_tensor(ones, heads, torch.float32)
    )
    return made[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon_alibi"])
def test_the_product_has_the_library_s_bias_at_every_position(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    layer = layers(adapted(family, tmp_path))[0]
    heads = len(layer.slopes)
    positions = torch.tensor([0, 1, 2, 3, 255, 257, 4097, 65_535, LENGTH - 2, LENGTH - 1])
    nothing = torch.zeros(1, heads, len(positions), 16, dtype=dtype)
    query, key = with_bias(nothing, nothing, layer.bias(positions) / (SCALING * UNIT))
    assert query.dtype == key.dtype == dtype and query.shape[3] % 16 == 0
    scores = SCALING * (query.double() @ key.double().transpose(2, 3))[0]
    expected = library_bias(family, heads)[:, positions].double()
    if family == "falcon_alibi":  # scaled with the scores
        expected *= layer.module.inv_norm_factor
    between = expected.unsqueeze(1) - expected.unsqueeze(2)
    assert (scores - between).abs().max() < 2e-2 and between.abs().max() > 1e3
    assert torch.allclose(scores[:, -1, -3:], between[:, -1, -3:], atol=1e-2)
    assert torch.allclose(scores[:, :4, :4], between[:, :4, :4], atol=1e-4)


def test_local_masks_are_the_library_s(tmp_path: Path) -> None:
    save_checkpoint("gpt_neo", tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model = adapted("gpt_neo", tmp_path)
    assert [each.sliding_window for each in layers(model)] == [WINDOW, None, WINDOW]
    tokens = torch.arange(3 * WINDOW).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(model(tokens, use_cache=False).logits, plain(tokens, use_cache=False).logits)
    assert not any("bias" in each.module._buffers for each in layers(model))


@pytest.mark.parametrize("family", ["rembert", "megatron_bert"])
def test_an_encoder_is_refused(family: str, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path, is_decoder=False)
    with pytest.raises(FailedPrecondition, match="look ahead"):
        load_checkpoint(str(tmp_path))


def test_every_older_family_is_one_that_the_interface_does_not_reach() -> None:
    for kind, older in OLDER.items():
        config = transformers.AutoConfig.for_model(kind)
        model = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        assert older.layer in vars(importlib.import_module(model.__module__))


@pytest.mark.parametrize(("family", "length"), [("mpt", 512), ("falcon", 512), ("openai_gpt", 512), ("bloom", 1 << 20)])
def test_the_longest_text_has_other_names(family: str, length: int, tmp_path: Path) -> None:
    changes = {} if family != "bloom" else {"max_position_embeddings": None}
    save_checkpoint(family, tmp_path, **changes)
    assert load_checkpoint(str(tmp_path)).info.max_length == length
