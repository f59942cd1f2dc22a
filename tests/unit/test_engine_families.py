"""Packed steps against the library's own plain forward pass, family by family (fp32)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from slipstream.engine import plan as plan_module
from slipstream.engine.checkpoint import load_checkpoint
from slipstream.engine.kv import KVStore
from slipstream.engine.packed import PackedEngine
from slipstream.engine.sequence import Sequence
from slipstream.engine.step import Segment
from tests.checkpoints import FAMILIES, VOCABULARY, WINDOW, save_checkpoint

TOLERANCE = 1e-4
"""Largest difference of a logit; logits reach 3 to 5, packed and plain differ by about 1e-5."""
TREE = [-1, -1, 0, 0, 1, 2, 3, 5]


@dataclass
class Pair:
    """An engine and the library's model on the same weights."""

    engine: PackedEngine
    reference: Any

    def expect(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


@dataclass
class Session:
    """What a session should be: its committed tokens, next to what the engine holds of it."""

    sequence: Sequence
    tokens: list[int]
    written: int = 0
    step: Segment = field(init=False)

    def segment(self, count: int | None = None, parents: list[int] | None = None) -> Segment:
        parents = parents or []
        stop = len(self.tokens) if count is None else self.written + count
        nodes = [(31 * node + 7 * len(self.tokens)) % VOCABULARY for node in range(len(parents))]
        pending = self.tokens[self.written : stop]
        self.step = Segment(self.sequence, pending, nodes, parents, want_logits=stop == len(self.tokens))
        return self.step

    def keep(self, pair: Pair, path: list[int], bonus: int | None = 5) -> None:
        pair.engine.keep(self.step, path)
        self.tokens += [self.step.nodes[node] for node in path]
        self.written = self.sequence.length
        if self.step.want_logits and bonus is not None:
            self.tokens.append(bonus)

    def rollback(self, pair: Pair, length: int) -> None:
        """To `length` committed tokens, the last of them pending."""
        pair.engine.rollback(self.sequence, length - 1)
        self.tokens = self.tokens[:length]
        self.written = length - 1

    def paths(self) -> list[list[int]]:
        """The full text behind every logits row."""
        texts = [list(self.tokens)]
        for token, parent in zip(self.step.nodes, self.step.parents, strict=True):
            texts.append([*texts[parent + 1], token])
        return texts if self.step.want_logits else []


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def worst(pair: Pair, sessions: list[Session]) -> float:
    """Runs the sessions' segments in one step; the largest difference from plain forward passes."""
    logits = pair.engine.forward([session.step for session in sessions])
    texts = [text for session in sessions for text in session.paths()]
    assert logits.shape == (len(texts), VOCABULARY) and logits.dtype == torch.float32
    if not texts:
        return 0.0
    return float((logits - torch.stack([pair.expect(text) for text in texts])).abs().max())


def prefill(pair: Pair, session: Session) -> None:
    session.segment()
    assert worst(pair, [session]) < TOLERANCE
    session.keep(pair, [])


def fragment(engine: PackedEngine) -> list[Sequence]:
    """Takes every second block, so that whatever is opened next has no contiguous run."""
    singles = [engine.open(1) for _ in range(engine.blocks_total)]
    for single in singles[::2]:
        engine.close(single)
    return singles[1::2]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def build(family: str, dtype: str = "float32") -> Pair:
        folder = save_checkpoint(family, tmp_path_factory.mktemp(family))
        kind = transformers.AutoModelForCausalLM
        reference = kind.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
        return Pair(PackedEngine(load_checkpoint(str(folder), dtype), tokens=1024, block_size=8), reference)

    return build


@pytest.fixture(params=[False, True], ids=["contiguous", "fragmented"])
def opened(request: pytest.FixtureRequest, pairs: Any) -> Iterator[Any]:
    """Opens sessions in a fresh or a fragmented pool and closes them after the test."""
    used: list[tuple[PackedEngine, Sequence]] = []

    def build(pair: Pair, lengths: list[int]) -> list[Session]:
        if request.param:
            used.extend((pair.engine, single) for single in fragment(pair.engine))
        sessions = [Session(pair.engine.open(64), prompt(length, length)) for length in lengths]
        assert all((session.sequence.rows is not None) == request.param for session in sessions)
        used.extend((pair.engine, session.sequence) for session in sessions)
        return sessions

    yield build
    for engine, sequence in used:
        engine.close(sequence)
        assert engine.blocks_free <= engine.blocks_total
    assert all(engine.blocks_free == engine.blocks_total for engine, _ in used)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_equals_plain_forward_passes(family: str, pairs: Any, opened: Any) -> None:
    pair = pairs(family)
    chunked, plain, chain, tree = opened(pair, [2 * WINDOW, WINDOW - 3, WINDOW + 1, WINDOW + 6])
    for session in (plain, chain, tree):
        prefill(pair, session)

    chunked.segment(7)
    plain.segment()
    chain.segment(parents=[-1, 0, 1, 2])
    tree.segment(parents=TREE)
    assert worst(pair, [chunked, plain, chain, tree]) < TOLERANCE
    chunked.keep(pair, [])
    plain.keep(pair, [])
    chain.keep(pair, [0, 1])
    tree.keep(pair, [0, 2, 5, 7])  # rows 0, 2, 5, 7 become 0, 1, 2, 3

    chunked.segment()
    plain.segment(parents=[-1, -1])
    chain.segment(parents=[-1, 0])
    tree.segment(parents=[-1, -1, 1, 2])
    assert worst(pair, [tree, chain, plain, chunked]) < TOLERANCE
    tree.keep(pair, [1, 2])
    chain.keep(pair, [])
    for session in (tree, chain):
        session.rollback(pair, WINDOW)
        session.segment(parents=[-1, -1, 0])
    assert worst(pair, [chain, tree]) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(family: str, pairs: Any) -> None:
    pair = pairs(family)
    tokens = prompt(9, 3)
    with torch.inference_mode():
        generated = pair.reference.generate(torch.tensor([tokens]), max_new_tokens=14, do_sample=False)
    sequence = pair.engine.open(32)
    pending, text = tokens, list(tokens)
    for _ in range(14):
        segment = Segment(sequence, pending)
        pending = [int(pair.engine.forward([segment])[0].argmax())]
        pair.engine.keep(segment, [])
        text += pending
    pair.engine.close(sequence)
    assert text == generated[0].tolist()


def _tree_then_one(pair: Pair, tree: Session) -> float:
    prefill(pair, tree)
    tree.segment(parents=TREE)
    pair.engine.forward([tree.step])
    tree.keep(pair, [1, 4])
    tree.segment()
    return worst(pair, [tree])


def test_without_compaction_the_text_would_change(pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs("llama")
    good, bad = opened(pair, [20, 20])
    assert _tree_then_one(pair, good) < TOLERANCE
    monkeypatch.setattr(KVStore, "move", lambda self, moves: None)
    assert _tree_then_one(pair, bad) > 0.1


def test_a_visible_rejected_token_would_change_the_text(pairs: Any, opened: Any) -> None:
    pair = pairs("llama")
    (session,) = opened(pair, [20])
    prefill(pair, session)
    session.segment(parents=[-1])
    pair.engine.forward([session.step])
    session.keep(pair, [])
    session.sequence.length += 1
    session.segment()
    assert worst(pair, [session]) > 0.1


def test_a_causal_mask_would_change_a_tree(pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs("llama")
    (session,) = opened(pair, [20])
    prefill(pair, session)
    causal = lambda segment: torch.full((segment.tokens, segment.tokens), float("-inf")).triu_(1)  # noqa: E731
    monkeypatch.setattr(plan_module, "inside_mask", causal)
    session.segment(parents=TREE)
    assert worst(pair, [session]) > 0.1


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_forgotten_window_would_change_the_text(
    family: str, pairs: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs(family)
    (session,) = opened(pair, [2 * WINDOW])
    prefill(pair, session)
    real = plan_module.Plan._read
    monkeypatch.setattr(plan_module.Plan, "_read", lambda self, at, kind: real(self, at, kind._replace(window=None)))
    session.segment(parents=[-1])
    assert worst(pair, [session]) > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_bf16_rows_do_not_depend_on_who_shares_the_step(family: str, pairs: Any, opened: Any) -> None:
    pair = pairs(family, "bfloat16")
    sessions = opened(pair, [20, 9, 14, 17])
    for session in sessions:
        pair.engine.forward([session.segment()])
        session.keep(pair, [])
    shapes = [[], [-1, 0, 1], TREE, [-1, -1, 0]]
    steps = [session.segment(parents=parents) for session, parents in zip(sessions, shapes, strict=True)]
    alone = torch.cat([pair.engine.forward([step]) for step in steps])
    assert torch.equal(pair.engine.forward(steps), alone)
