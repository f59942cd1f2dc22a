"""Sessions on an engine, and the library's own plain forward pass over their texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from slipstream.engine.models.checkpoint import load_checkpoint
from slipstream.engine.models.packed_library import unpacked
from slipstream.engine.segment import KVSequence, Segment
from slipstream.engine.torch_engine import TorchEngine
from tests.support.checkpoints import VOCABULARY, WINDOW

TOLERANCE = 1e-4
"""Largest difference of a logit; logits reach 3 to 5, packed and plain differ by about 1e-5."""
TREE = [-1, -1, 0, 0, 1, 2, 3, 5]
fragmented = pytest.mark.parametrize("opened", [True], ids=["fragmented"], indirect=True)
"""For what reads blocks where they lie: sessions whose blocks lie together are no case of their own."""


@dataclass
class Pair:
    """An engine and the library's model on the same weights."""

    engine: TorchEngine
    reference: Any

    def expect(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


@dataclass
class Session:
    """What a session should be: its committed tokens, next to what the engine holds of it."""

    sequence: KVSequence
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
        pair.engine.kv.keep(self.step, path)
        self.tokens += [self.step.nodes[node] for node in path]
        self.written = self.sequence.length
        if self.step.want_logits and bonus is not None:
            self.tokens.append(bonus)

    def rollback(self, pair: Pair, length: int) -> None:
        """To `length` committed tokens, the last of them pending."""
        pair.engine.kv.rollback(self.sequence, length - 1)
        self.tokens = self.tokens[:length]
        self.written = length - 1

    def paths(self) -> list[list[int]]:
        """The full text behind every logits row."""
        texts = [list(self.tokens)]
        for token, parent in zip(self.step.nodes, self.step.parents, strict=True):
            texts.append([*texts[parent + 1], token])
        return texts if self.step.want_logits else []


def library_model(folder: str, dtype: str = "auto") -> Any:
    """As the library loads it, with its own weights."""
    with unpacked():
        forward: Any = load_checkpoint(folder, dtype, lean=False).forward
    return forward.model


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def worst(pair: Pair, sessions: list[Session]) -> float:
    """Runs the sessions' segments in one step; the largest difference from plain forward passes."""
    logits = pair.engine.forward([session.step for session in sessions]).logits
    texts = [text for session in sessions for text in session.paths()]
    assert logits.shape == (len(texts), VOCABULARY) and logits.dtype == torch.float32
    if not texts:
        return 0.0
    return float((logits - torch.stack([pair.expect(text) for text in texts])).abs().max())


def prefill(pair: Pair, session: Session) -> None:
    session.segment()
    assert worst(pair, [session]) < TOLERANCE
    session.keep(pair, [])


def fragment(engine: TorchEngine) -> list[KVSequence]:
    """Takes every second block, so that whatever is opened next has no contiguous run."""
    singles = [engine.kv.begin_unshared(1) for _ in range(engine.kv.blocks_total)]
    for single in singles[::2]:
        engine.kv.close(single)
    return singles[1::2]


def check_mixed_steps(pair: Pair, opened: Callable[[Pair, list[int]], list[Session]]) -> None:
    """Prefill chunks, plain tokens, chains and trees share steps; paths are kept, two sessions are rolled back."""
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


def check_greedy_text(pair: Pair) -> None:
    """The library's own greedy text, token by token."""
    tokens = prompt(9, 3)
    with torch.inference_mode():
        generated = pair.reference.generate(torch.tensor([tokens]), max_new_tokens=14, do_sample=False)
    sequence = pair.engine.kv.begin_unshared(32)
    pending, text = tokens, list(tokens)
    for _ in range(14):
        segment = Segment(sequence, pending)
        pending = [int(pair.engine.forward([segment]).logits[0].argmax())]
        pair.engine.kv.keep(segment, [])
        text += pending
    pair.engine.kv.close(sequence)
    assert text == generated[0].tolist()


def check_deep_tree(pair: Pair, opened: Callable[[Pair, list[int]], list[Session]]) -> None:
    """A branch that is longer than the window, under a node whose slot lies far beyond its depth."""
    (session,) = opened(pair, [WINDOW + 1])
    prefill(pair, session)
    session.segment(parents=[-1] * 10 + list(range(9, 11 + WINDOW)))
    assert worst(pair, [session]) < TOLERANCE
