"""Engines beside the library's models, and sessions on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers

from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.segment import KVSequence
from slipstream.engine.torch_engine import TorchEngine
from tests.support.checkpoints import save_checkpoint
from tests.support.packed_passes import Pair, Session, fragment, prompt


def plain(checkpoint: Checkpoint) -> TorchEngine:
    return TorchEngine(checkpoint, tokens=1024, block_size=8)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def build(family: str, dtype: str = "float32", engine: Callable[[Checkpoint], TorchEngine] = plain) -> Pair:
        folder = save_checkpoint(family, tmp_path_factory.mktemp(family))
        kind = transformers.AutoModelForCausalLM
        # Its eager pass of Falcon adds ALiBi's bias twice; the pass that it takes by itself, once.
        attends = "sdpa" if family == "falcon_alibi" else "eager"
        reference = kind.from_pretrained(folder, attn_implementation=attends, dtype=dtype).eval()
        return Pair(engine(load_checkpoint(str(folder), dtype)), reference)

    return build


@pytest.fixture(params=[False, True], ids=["contiguous", "fragmented"])
def opened(request: pytest.FixtureRequest, pairs: Any) -> Iterator[Any]:
    """Opens sessions in a fresh or a fragmented pool and closes them after the test."""
    used: list[tuple[TorchEngine, KVSequence]] = []

    def build(pair: Pair, lengths: list[int]) -> list[Session]:
        if request.param:
            used.extend((pair.engine, single) for single in fragment(pair.engine))
        sessions = [Session(pair.engine.kv.begin_unshared(64), prompt(length, length)) for length in lengths]
        assert all((session.sequence.rows is not None) == request.param for session in sessions)
        used.extend((pair.engine, session.sequence) for session in sessions)
        return sessions

    yield build
    for engine, sequence in used:
        engine.kv.close(sequence)
        assert engine.kv.blocks_free <= engine.kv.blocks_total
    assert all(engine.kv.blocks_free == engine.kv.blocks_total for engine, _ in used)
