"""The padded plan against the library's own plain forward pass, family by family (fp32)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.attention import flex_attention as flex_module

from slipstream.engine.buckets import Buckets
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.flex import FlexKernel, Kernel
from slipstream.engine.graphs import Acceleration
from slipstream.engine.packed import PackedEngine
from tests.checkpoints import FAMILIES
from tests.packed import check_mixed_steps
from tests.tape import listed_attention

WIDTH = 4
"""So narrow that prompts and trees of these tests take several chunks."""


def paged(kernel: Kernel) -> Callable[[Checkpoint], PackedEngine]:
    acceleration = Acceleration(kernel, None, Buckets(WIDTH, most_tokens=64))
    return lambda checkpoint: PackedEngine(checkpoint, tokens=1024, block_size=8, acceleration=acceleration)


LISTED = paged(listed_attention)
FLEX = paged(FlexKernel(compiled=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_equals_plain_forward_passes(family: str, pairs: Any, opened: Any) -> None:
    check_mixed_steps(pairs(family, engine=LISTED), opened)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma4", "gpt_oss"])
def test_flex_attention_computes_the_same(
    family: str, pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The operator's definition, without the seconds that it takes to wrap it for a compiler which does nothing.
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    check_mixed_steps(pairs(family, engine=FLEX), opened)
