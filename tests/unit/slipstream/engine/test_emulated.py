from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.emulated.model import EmulatedModel, LinearCost
from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.segment import Segment
from slipstream.errors import InvalidArgument, OutOfRange, ResourceExhausted
from tests.support.greedy_text import greedy


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
    return EmulatedEngine(model, cost or LinearCost(0.0), BlockPool(64, 16), fake.clock, fake.sleep)


def test_the_text_depends_on_seed_first_token_and_position_only() -> None:
    text = greedy(build(), [7, 1, 2], 20)
    assert greedy(build(), [7, 9, 9], 20) == text
    assert greedy(build(), [7, 1, 2, *text[:5]], 15) == text[5:]
    assert greedy(build(), [8, 1, 2], 20) != text
    assert greedy(build(seed=1), [7, 1, 2], 20) != text
    assert len(set(text)) > 10


def test_tree_rows_predict_their_own_depth() -> None:
    engine = build()
    text = greedy(engine, [7], 6)
    segment = Segment(engine.kv.begin_unshared(32), [7], [text[0], 99, text[1], 98, text[2]], [-1, -1, 0, 1, 2])
    rows = engine.forward([segment]).logits.argmax(dim=1).tolist()
    assert rows == [text[0], text[1], text[1], text[2], text[2], text[3]]
    engine.kv.keep(segment, [0, 2, 4])
    after = Segment(segment.sequence, [text[3]])
    assert engine.forward([after]).logits.argmax(dim=1).tolist() == [text[4]]


def test_prefill_in_chunks_changes_nothing() -> None:
    engine = build()
    whole = Segment(engine.kv.begin_unshared(32), [7, 1, 2, 3, 4])
    parts = [Segment(engine.kv.begin_unshared(32), [7, 1], want_logits=False)]
    assert engine.forward([parts[0]]).logits.shape == (0, 256)
    engine.kv.keep(parts[0], [])
    assert torch.equal(engine.forward([Segment(parts[0].sequence, [2, 3, 4])]).logits, engine.forward([whole]).logits)


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
    logits = build().forward([Segment(build().kv.begin_unshared(8), [1])]).logits
    assert logits.dtype == torch.float32
    assert float(logits.softmax(dim=1).max()) == 1.0


def test_time_follows_the_cost_curve() -> None:
    fake = FakeTime()
    engine = build(cost=LinearCost(0.010, 0.001, 0.002), fake=fake)
    engine.forward(
        [Segment(engine.kv.begin_unshared(8), [1, 2, 3]), Segment(engine.kv.begin_unshared(8), [1], [2], [-1])]
    )
    assert fake.slept == [pytest.approx(0.010 + 5 * 0.001 + 2 * 0.002)]


def test_kv_is_accounted_for() -> None:
    engine = build()
    sequence = engine.kv.begin_unshared(17)
    assert engine.kv.blocks_free == engine.kv.blocks_total - 2
    with pytest.raises(ResourceExhausted):
        engine.kv.begin_unshared(64 * 16)
    with pytest.raises(OutOfRange):
        engine.forward([Segment(sequence, [1] * (2 * engine.kv.block_size + 1))])
    with pytest.raises(InvalidArgument):
        engine.forward([Segment(sequence, [256])])
    engine.kv.close(sequence)
    assert engine.kv.blocks_free == engine.kv.blocks_total


def test_without_a_fake_the_engine_sleeps() -> None:
    engine = EmulatedEngine(EmulatedModel(), LinearCost(base_s=0.02), BlockPool(4, 16))
    segment = Segment(engine.kv.begin_unshared(8), [1])
    begin = time.perf_counter()
    engine.forward([segment])
    assert time.perf_counter() - begin >= 0.02


def test_where_a_drafter_is_wrong_the_target_token_is_among_its_next_candidates_at_the_set_share() -> None:
    model = EmulatedModel(vocabulary_size=64, acceptance=0.6, fanout=0.5)
    drafter = EmulatedEngine(model, LinearCost(0.0), BlockPool(256, 16))
    truth = greedy(build_sized(64), [7], 2000)
    segment = Segment(drafter.kv.begin_unshared(2001), [7, *truth[:-1]])
    rows = []
    for token in segment.pending:
        part = Segment(segment.sequence, [token])
        rows.append(drafter.forward([part]).logits[0])
        drafter.kv.keep(part, [])
    log_q = torch.stack(rows).log_softmax(dim=-1)
    places = (log_q.argsort(dim=-1, descending=True) == torch.tensor(truth)[:, None]).int().argmax(dim=-1)
    first, further = float((places == 0).float().mean()), float(((places > 0) & (places < 4)).float().mean())
    assert first == pytest.approx(0.6, abs=0.05) and further == pytest.approx(0.2, abs=0.04)
    confidence = log_q.max(dim=-1).values.exp()
    assert torch.allclose(confidence, torch.tensor(0.6), atol=0.01), "and says so"


def build_sized(vocabulary_size: int) -> Engine:
    return EmulatedEngine(EmulatedModel(vocabulary_size=vocabulary_size), LinearCost(0.0), BlockPool(256, 16))


def test_tokens_up_to_the_flat_part_cost_nothing_more() -> None:
    cost = LinearCost(base_s=1.0, per_token_s=0.5, free_tokens=16)
    assert [cost(tokens, 1) for tokens in (1, 16, 17, 20)] == [1.0, 1.0, 1.5, 3.0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [("vocabulary=inf", "finite"), ("base_ms=nan", "finite"), ("vocabulary=7", "8 at least"), ("speed=1", "base_ms")],
)
def test_settings_that_cannot_be_emulated_are_refused_in_words(settings: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        open_engine(f"emulated:{settings}")


def test_room_for_less_than_a_block_is_refused_in_words() -> None:
    assert open_engine("emulated:", kv_tokens=32).kv.blocks_total == 1
    with pytest.raises(ResourceExhausted, match="31 tokens"):
        open_engine("emulated:", kv_tokens=31)
