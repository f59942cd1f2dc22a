from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from slipstream.engine.blocks import BlockPool
from slipstream.engine.emulated import EmulatedEngine, EmulatedModel, LinearCost
from slipstream.engine.engine import Engine
from slipstream.engine.step import Segment
from slipstream.errors import InvalidArgument, OutOfRange, ResourceExhausted


@dataclass
class FakeTime:
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def build(
    acceptance: float = 1.0, cost: LinearCost | None = None, seed: int = 0, fake: FakeTime | None = None
) -> Engine:
    fake = fake or FakeTime()
    model = EmulatedModel(acceptance=acceptance, seed=seed)
    return EmulatedEngine(model, cost or LinearCost(), BlockPool(64, 16), fake.clock, fake.sleep)


def decode(engine: Engine, prompt: list[int], count: int) -> list[int]:
    sequence = engine.open(len(prompt) + count)
    text, pending = list(prompt), list(prompt)
    for _ in range(count):
        segment = Segment(sequence, pending)
        pending = [int(engine.forward([segment])[0].argmax())]
        engine.keep(segment, [])
        text += pending
    engine.close(sequence)
    return text[len(prompt) :]


def test_the_text_depends_on_seed_first_token_and_position_only() -> None:
    text = decode(build(), [7, 1, 2], 20)
    assert decode(build(), [7, 9, 9], 20) == text
    assert decode(build(), [7, 1, 2, *text[:5]], 15) == text[5:]
    assert decode(build(), [8, 1, 2], 20) != text
    assert decode(build(seed=1), [7, 1, 2], 20) != text
    assert len(set(text)) > 10


def test_tree_rows_predict_their_own_depth() -> None:
    engine = build()
    text = decode(engine, [7], 6)
    segment = Segment(engine.open(32), [7], [text[0], 99, text[1], 98, text[2]], [-1, -1, 0, 1, 2])
    rows = engine.forward([segment]).argmax(dim=1).tolist()
    assert rows == [text[0], text[1], text[1], text[2], text[2], text[3]]
    engine.keep(segment, [0, 2, 4])
    after = Segment(segment.sequence, [text[3]])
    assert engine.forward([after]).argmax(dim=1).tolist() == [text[4]]


def test_prefill_in_chunks_changes_nothing() -> None:
    engine = build()
    whole = Segment(engine.open(32), [7, 1, 2, 3, 4])
    parts = [Segment(engine.open(32), [7, 1], want_logits=False)]
    assert engine.forward([parts[0]]).shape == (0, 256)
    engine.keep(parts[0], [])
    assert torch.equal(engine.forward([Segment(parts[0].sequence, [2, 3, 4])]), engine.forward([whole]))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_a_drafter_agrees_at_the_set_share_of_positions(acceptance: float) -> None:
    positions = np.arange(20000, dtype=np.uint64)
    salts = np.zeros_like(positions)
    target, drafter = build(), build(acceptance)
    assert isinstance(target, EmulatedEngine) and isinstance(drafter, EmulatedEngine)
    agreed = float((target.tokens(salts, positions) == drafter.tokens(salts, positions)).mean())
    # Five standard deviations of a share of 20000.
    assert abs(agreed - acceptance) <= 5 * (acceptance * (1 - acceptance) / 20000) ** 0.5


def test_logits_are_peaked_far_beyond_any_noise() -> None:
    logits = build().forward([Segment(build().open(8), [1])])
    assert logits.dtype == torch.float32
    assert float(logits.softmax(dim=1).max()) == 1.0


def test_time_follows_the_cost_curve() -> None:
    fake = FakeTime()
    engine = build(cost=LinearCost(0.010, 0.001, 0.002), fake=fake)
    engine.forward([Segment(engine.open(8), [1, 2, 3]), Segment(engine.open(8), [1], [2], [-1])])
    assert fake.slept == [pytest.approx(0.010 + 5 * 0.001 + 2 * 0.002)]


def test_kv_is_accounted_for() -> None:
    engine = build()
    sequence = engine.open(17)
    assert engine.blocks_free == engine.blocks_total - 2
    with pytest.raises(ResourceExhausted):
        engine.open(64 * 16)
    with pytest.raises(OutOfRange):
        engine.forward([Segment(sequence, [1] * 18)])
    with pytest.raises(InvalidArgument):
        engine.forward([Segment(sequence, [256])])
    engine.close(sequence)
    assert engine.blocks_free == engine.blocks_total


def test_without_a_fake_the_engine_sleeps() -> None:
    engine = EmulatedEngine(EmulatedModel(), LinearCost(base_s=0.02), BlockPool(4, 16))
    segment = Segment(engine.open(8), [1])
    begin = time.perf_counter()
    engine.forward([segment])
    assert time.perf_counter() - begin >= 0.02
