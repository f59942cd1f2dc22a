"""Hidden states that a forward pass returns on request, against transformers' own `output_hidden_states` (fp32)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.engine.engine import HiddenRequest, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.forward import ForwardStep
from slipstream.engine.models.checkpoint import Checkpoint, load_checkpoint
from slipstream.engine.models.lean_decoder import LeanDecoder
from slipstream.engine.models.library_forward import LibraryForward
from slipstream.engine.segment import Segment
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import FailedPrecondition, InvalidArgument
from tests.support.checkpoints import WINDOW, save_checkpoint
from tests.support.packed_passes import TOLERANCE, TREE, Pair, Session, fragment, prompt

REQUEST = HiddenRequest(layers=(2, 0))
LEAN = ("llama", "qwen2", "qwen3", "mistral")


def library(checkpoint: Checkpoint) -> TorchEngine:
    assert isinstance(checkpoint.forward, LibraryForward)
    return TorchEngine(checkpoint, tokens=1024, block_size=8)


def lean(checkpoint: Checkpoint) -> TorchEngine:
    assert isinstance(checkpoint.forward, LeanDecoder)
    return TorchEngine(checkpoint, tokens=1024, block_size=8)


def row_texts(session: Session) -> list[list[int]]:
    """The text up to and with each of the step's tokens, whether it gets logits or not."""
    step = session.step
    committed = session.tokens[: session.written]
    texts = [[*committed, *step.pending[: count + 1]] for count in range(len(step.pending))]
    root = len(texts) - 1
    for token, parent in zip(step.nodes, step.parents, strict=True):
        texts.append([*texts[root + 1 + parent if parent >= 0 else root], token])
    return texts


def check_step(pair: Pair, sessions: list[Session]) -> None:
    """Runs one step with and without the request: equal logits, and hidden states as transformers has them."""
    steps = [session.step for session in sessions]
    plain, output = pair.engine.forward(steps), pair.engine.forward(steps, REQUEST)
    assert plain.hidden is None and output.hidden is not None
    assert plain.logits.shape == output.logits.shape
    assert torch.allclose(plain.logits, output.logits, atol=TOLERANCE)
    texts = [text for session in sessions for text in row_texts(session)]
    assert set(output.hidden.layers) == set(REQUEST.layers)
    assert output.hidden.last.shape[0] == len(texts) == sum(segment.tokens for segment in steps)
    for row, text in enumerate(texts):
        with torch.inference_mode():
            states = pair.reference(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
        assert torch.allclose(output.hidden.last[row], states[-1][0, -1], atol=TOLERANCE)
        for number in REQUEST.layers:
            assert torch.allclose(output.hidden.layers[number][row], states[number][0, -1], atol=TOLERANCE)


def check_mixed_steps(pair: Pair, fragmented: bool) -> None:
    """Packed sequences, chunked prefill, trees, kept paths, a rollback and KV that another sequence computed."""
    engine = pair.engine
    singles = fragment(engine) if fragmented else []
    sessions = [Session(engine.kv.begin([], ""), prompt(length, length)) for length in (2 * WINDOW, 9, WINDOW + 6)]

    def grow(*counts: int | None, parents: list[int] | None = None) -> None:
        for session, count in zip(sessions, counts, strict=True):
            engine.kv.grow(
                session.sequence, session.segment(count, parents if session is sessions[-1] else None).tokens
            )

    grow(7, None, None)
    check_step(pair, sessions)
    for session in sessions:
        session.keep(pair, [])
    grow(None, None, None, parents=TREE)
    check_step(pair, sessions)
    for session, path in zip(sessions, ([], [], [0, 2, 5, 7]), strict=True):
        session.keep(pair, path)
    sessions[-1].rollback(pair, WINDOW)
    grow(None, None, None, parents=[-1, -1, 0])
    check_step(pair, sessions)

    reused = Session(engine.kv.begin(prompt(2 * WINDOW, 2 * WINDOW), ""), prompt(2 * WINDOW, 2 * WINDOW))
    reused.written = reused.sequence.length
    assert reused.written == 16
    engine.kv.grow(reused.sequence, reused.segment().tokens)
    check_step(pair, [reused])
    for sequence in (*singles, reused.sequence, *(session.sequence for session in sessions)):
        engine.kv.close(sequence)


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("family", LEAN)
def test_the_lean_decoder_returns_what_the_library_does(family: str, fragmented: bool, pairs: Any) -> None:
    check_mixed_steps(pairs(family, engine=lean), fragmented)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gemma4", "olmo2", "phi3", "granite", "mixtral", "gpt_oss"])
def test_the_librarys_own_forward_returns_hidden_states(family: str, pairs: Any) -> None:
    check_mixed_steps(pairs(family, engine=library), fragmented=False)


def test_the_library_may_be_asked_where_the_lean_decoder_would_do(pairs: Any, tmp_path: Any) -> None:
    pair = pairs("llama")
    folder = save_checkpoint("llama", tmp_path)
    check_mixed_steps(Pair(library(load_checkpoint(str(folder), "float32", lean=False)), pair.reference), False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_leaves_the_logits_bit_for_bit(dtype: str, pairs: Any) -> None:
    engine = pairs("qwen3", dtype, engine=lean).engine
    sequence = engine.kv.begin([], "")
    engine.kv.grow(sequence, 30)
    segment = Segment(sequence, prompt(20, 1), [5, 6], [-1, -1])
    assert torch.equal(engine.forward([segment]).logits, engine.forward([segment], REQUEST).logits)
    engine.kv.close(sequence)


def test_without_a_request_no_hidden_state_is_kept_and_no_hook_is_installed(pairs: Any) -> None:
    checkpoint = pairs("gemma3", engine=library).engine._checkpoint
    asked: list[HiddenRequest | None] = []

    class Watched:
        reserve = staticmethod(checkpoint.forward.reserve)

        def __call__(self, step: ForwardStep, hidden: HiddenRequest | None = None) -> ModelOutput:
            asked.append(hidden)
            output: ModelOutput = checkpoint.forward(step, hidden)
            return output

    fresh = load_checkpoint(checkpoint.forward.model.name_or_path, "float32")
    hooks = [module for module in fresh.forward.model.modules() if module._forward_hooks]  # type: ignore[attr-defined]
    engine = TorchEngine(replace(checkpoint, forward=Watched()), tokens=64)
    sequence = engine.kv.begin([], "")
    engine.kv.grow(sequence, 4)
    assert engine.forward([Segment(sequence, [1, 2, 3])]).hidden is None
    assert asked == [None] and not hooks


def test_engines_without_hidden_states_refuse(pairs: Any) -> None:
    engine = open_engine("emulated:")
    sequence = engine.kv.begin([], "")
    engine.kv.grow(sequence, 1)
    with pytest.raises(FailedPrecondition, match="no hidden states") as found:
        engine.forward([Segment(sequence, [1])], HiddenRequest())
    assert found.value.reason == "HIDDEN_STATES_MISSING" and sequence.ahead == 0
    assert engine.forward([Segment(sequence, [1])]).hidden is None

    streams = pairs("gemma3n", engine=library).engine
    sequence = streams.kv.begin([], "")
    streams.kv.grow(sequence, 1)
    with pytest.raises(FailedPrecondition, match="one hidden state for each layer"):
        streams.forward([Segment(sequence, [1])], REQUEST)
    streams.kv.close(sequence)

    torch_engine = pairs("llama", engine=lean).engine
    sequence = torch_engine.kv.begin([], "")
    torch_engine.kv.grow(sequence, 1)
    for layers in ((3,), (-1,)):
        with pytest.raises(InvalidArgument, match="with 3 layers"):
            torch_engine.forward([Segment(sequence, [1])], HiddenRequest(layers))
    torch_engine.kv.close(sequence)
