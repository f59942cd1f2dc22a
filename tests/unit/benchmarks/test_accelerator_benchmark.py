"""The benchmark that waits for a GPU runs, on the shipped pair and with stand-ins for what only a GPU has."""

from __future__ import annotations

from benchmarks.accelerator import Setting, Ways, steps, texts
from benchmarks.processes import MODELS
from slipstream.engine.cuda_graphs.graphs import Acceleration
from slipstream.engine.cuda_graphs.inputs import Buckets
from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.torch_engine import TorchEngine
from tests.tape import TapeRecorder, listed_attention

SMALL = Setting(sessions=(1, 2), nodes=(0, 3), context=20, steps=1, chain=2, tokens=4, copied=1 << 16)


def test_every_way_is_timed_and_texts_are_the_same() -> None:
    target, draft = (load_checkpoint(str(MODELS / name), "float32") for name in ("target", "draft"))
    recorder, buckets = TapeRecorder(), Buckets(4, 8)
    choices: Ways = {"ordinary": None, "captured": Acceleration(listed_attention, recorder, buckets)}
    rows = list(steps("shipped", target, choices, SMALL))
    sizes = [(way, count, nodes) for way in choices for count in SMALL.sessions for nodes in SMALL.nodes]
    assert [(row["way"], row["sessions"], row["candidates"]) for row in rows] == sizes
    assert all(0.0 < float(row["host ms"] or 0) <= float(row["ms / step"] or 0) for row in rows)
    assert recorder.captures > 0
    engines = (
        TorchEngine(target, 1024, block_size=64, acceleration=choices["captured"]),
        TorchEngine(draft, 1024, block_size=64),
    )
    plain, speculative = texts("shipped", *engines, SMALL)
    assert plain["guesses"] == 0 and speculative["texts as plain"] == "4 of 4"
