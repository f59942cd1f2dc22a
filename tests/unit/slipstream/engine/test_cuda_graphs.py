"""Steps that are captured once and repeated: sizes, what is repeated, what cannot be."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine.cuda_graphs.flex import Call, unfit, width
from slipstream.engine.cuda_graphs.graphs import Acceleration, accelerate
from slipstream.engine.cuda_graphs.inputs import Buckets
from slipstream.engine.cuda_graphs.paged import PagedPlan
from slipstream.engine.engine import HiddenRequest, ModelOutput, begin_unshared
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.models.forward import ForwardStep
from slipstream.engine.torch_engine import TorchEngine
from tests.checkpoints import save_checkpoint
from tests.packed import TOLERANCE, TREE, Session, check_mixed_steps, fragmented, prefill, prompt, worst
from tests.tape import TapeRecorder, listed_attention

BUCKETS = Buckets(width=4, most_tokens=64)
LAYER = AttentionLayer(0, 0, 2, 16, 16, None, torch.float32, torch.device("cpu"))


@pytest.fixture
def recorder() -> TapeRecorder:
    return TapeRecorder()


def accelerated(checkpoint: Checkpoint, acceleration: Acceleration) -> TorchEngine:
    return TorchEngine(checkpoint, tokens=1024, block_size=8, acceleration=acceleration)


@pytest.fixture
def captured(recorder: TapeRecorder) -> Any:
    acceleration = Acceleration(listed_attention, recorder, BUCKETS)
    return lambda checkpoint: accelerated(checkpoint, acceleration)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_bucket_has_room_and_is_one_of_those_captured(counts: list[int]) -> None:
    bucket = BUCKETS.find(counts)
    if sum(counts) > BUCKETS.most_tokens:
        assert bucket is None
        return
    assert bucket in set(BUCKETS)
    chunks = sum(-(-count // BUCKETS.width) for count in counts)
    assert sum(counts) <= bucket.tokens < 2 * sum(counts) and chunks <= bucket.chunks < 2 * chunks


def test_buckets_come_once_and_the_largest_first() -> None:
    sizes = list(BUCKETS)
    assert len(set(sizes)) == len(sizes) and sizes == sorted(sizes, key=lambda size: -size.tokens)
    with pytest.raises(ValueError, match="power of two"):
        Buckets(width=4, most_tokens=48)


def test_the_tape_repeats_operations_and_nothing_else(recorder: TapeRecorder) -> None:
    source, target, factor = torch.arange(3.0), torch.zeros(3), [2.0]
    repeat = recorder.capture(lambda: target.copy_(source[1:].cumsum(0).sum() * factor[0] + source))  # type: ignore[arg-type,return-value]
    source.add_(1.0)
    factor[0] = 100.0
    repeat()
    assert target.tolist() == [(2 + 5) * 2 + value for value in (1, 2, 3)]
    with pytest.raises(RuntimeError, match="waits"):
        recorder.capture(lambda: target.add_(source.sum().item()))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_repeated_steps_equal_plain_forward_passes(
    family: str, pairs: Any, captured: Any, recorder: TapeRecorder
) -> None:
    pair = pairs(family, engine=captured)
    for _ in range(2):
        before = recorder.captures
        check_mixed_steps(
            pair, lambda _, lengths: [Session(begin_unshared(pair.engine, 64), prompt(n, n)) for n in lengths]
        )
    assert recorder.captures == before > 0  # the second time nothing was new


@fragmented
def test_a_number_that_is_read_from_the_step_would_stay(
    pairs: Any, opened: Any, captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PagedPlan.__init__

    def frozen(self: PagedPlan, *args: Any) -> None:
        real(self, *args)
        self.positions = torch.from_numpy(self._inputs._long["positions"].copy()).unsqueeze(0)[
            :, : self.tokens.shape[1]
        ]

    monkeypatch.setattr(PagedPlan, "__init__", frozen)
    (session,) = opened(pair := pairs("llama", engine=captured), [20])
    session.segment()
    assert worst(pair, [session]) > 0.1


@fragmented
def test_capturing_leaves_open_sessions_alone(pairs: Any, opened: Any, captured: Any, recorder: TapeRecorder) -> None:
    pair = pairs("llama", engine=captured)
    sessions = opened(pair, [20, 9])
    for session in sessions:
        prefill(pair, session)
    pair.engine.capture()
    assert recorder.captures == len(list(BUCKETS))
    for session in sessions:
        session.segment(parents=TREE)
    assert worst(pair, sessions) < TOLERANCE
    assert recorder.captures == len(list(BUCKETS))


@fragmented
def test_logits_stay_when_the_next_step_runs(pairs: Any, opened: Any, captured: Any) -> None:
    pair = pairs("llama", engine=captured)
    first, second = opened(pair, [20, 19])
    logits = pair.engine.forward([first.segment()]).logits
    kept = logits.clone()
    pair.engine.forward([second.segment()])
    assert torch.equal(logits, kept)


def test_a_step_above_all_buckets_takes_the_ordinary_way(pairs: Any, captured: Any, recorder: TapeRecorder) -> None:
    pair = pairs("mistral", engine=captured)
    session = Session(begin_unshared(pair.engine, 128), prompt(BUCKETS.most_tokens + 1, 3))
    prefill(pair, session)
    assert recorder.captures == 0
    session.segment(parents=TREE)
    assert worst(pair, [session]) < TOLERANCE
    assert recorder.captures == 1
    pair.engine.close(session.sequence)


@fragmented
def test_what_cannot_be_captured_is_launched(
    pairs: Any, opened: Any, captured: Any, recorder: TapeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    def build(checkpoint: Checkpoint) -> TorchEngine:
        class Looking:
            reserve = staticmethod(checkpoint.forward.reserve)

            def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
                assert int(step.tokens.max()) >= 0
                return checkpoint.forward(step, hidden)

        return captured(replace(checkpoint, forward=Looking()))  # type: ignore[no-any-return]

    with caplog.at_level(logging.WARNING):
        check_mixed_steps(pairs("llama", engine=build), opened)
    assert recorder.captures == 0
    said = [record.message for record in caplog.records if "cannot be captured" in record.message]
    assert len(said) == 1 and said[0].endswith("waits for the device")


@fragmented
def test_a_kernel_that_cannot_run_is_done_without(
    pairs: Any, opened: Any, recorder: TapeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise RuntimeError("no compiler")

    acceleration = Acceleration(refuse, recorder, BUCKETS)
    with caplog.at_level(logging.WARNING):
        check_mixed_steps(pairs("llama", engine=lambda checkpoint: accelerated(checkpoint, acceleration)), opened)
    assert [record.message for record in caplog.records].count(
        "steps are not padded: the attention kernel cannot be compiled or run here: no compiler"
    ) == 1


@fragmented
def test_rows_of_one_bucket_do_not_depend_on_who_shares_it(pairs: Any, opened: Any, captured: Any) -> None:
    pair = pairs("llama", engine=captured)
    kept, one, other = opened(pair, [20, 9, 17])
    for session in (kept, one, other):
        pair.engine.forward([session.segment()])
        session.keep(pair, [])
    step = kept.segment(parents=TREE)
    rows = step.logit_rows
    found = [pair.engine.forward([step, company.segment()]).logits[:rows] for company in (one, other)]
    assert torch.equal(*found)


@pytest.mark.parametrize(("group", "expected"), [(1, 16), (4, 16), (7, 16), (8, 8), (16, 4), (64, 1), (127, 1)])
def test_a_chunks_query_rows_fit_the_short_query_kernel(group: int, expected: int) -> None:
    layers = [replace(LAYER, group=group), LAYER]
    assert width(layers) == expected and expected * group < 128
    assert unfit(layers) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"group": 128}, "share one KV head"),
        ({"value_dim": 8}, "fewer than 16"),
        ({"device": "meta"}, "several devices"),
    ],
)
def test_what_the_kernel_cannot_do_takes_the_ordinary_way(
    change: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint("llama", tmp_path)))
    with caplog.at_level(logging.WARNING):
        assert accelerate(replace(checkpoint, layers=[LAYER, replace(LAYER, **change)])) is None
    assert why in caplog.text
