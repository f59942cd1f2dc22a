"""An engine's own greedy text, one token a pass: what everything else is compared with."""

from __future__ import annotations

from slipstream.engine.engine import Engine
from slipstream.engine.segment import Segment


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens after the prompt."""
    sequence = engine.kv.begin_unshared(len(prompt) + count)
    text, pending = list[int](), prompt
    for _ in range(count):
        segment = Segment(sequence, pending)
        pending = [int(engine.forward([segment]).logits[0].argmax())]
        engine.kv.keep(segment, [])
        text += pending
    engine.kv.close(sequence)
    return text
