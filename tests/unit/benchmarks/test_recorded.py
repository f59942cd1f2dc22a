"""Drafting beside known texts counts what a verifier would accept; texts that training kept are read as they were."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.equality_steps import Text
from benchmarks.kept_answers import KeptAnswers
from benchmarks.recorded import NODES, Given, Way, walk
from slipstream.engine.engine import HiddenStates
from slipstream.errors import SlipstreamError
from slipstream.proposers.base import (
    HiddenNeed,
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
    open_proposer,
)
from training.answer_store import AnswerStore

PROMPT, OUTPUT = [7, 8, 9], list(range(20, 120))
TEXT = Text("greedy", PROMPT, 1, len(OUTPUT), plain=OUTPUT)


def test_a_prediction_that_is_the_text_is_accepted_whole() -> None:
    counts = walk([TEXT], open_proposer("prediction", ProposerSettings()), Way(), Given(lambda text: text.plain))
    assert counts.tokens == len(OUTPUT) and counts.passes == -(-len(OUTPUT) // (NODES + 1))
    fewer = walk([TEXT], open_proposer("prediction", ProposerSettings()), Way(nodes=4), Given(lambda text: text.plain))
    assert fewer.passes == -(-len(OUTPUT) // 5)


def test_without_a_candidate_each_pass_commits_one_token() -> None:
    counts = walk([TEXT, TEXT], open_proposer("prediction", ProposerSettings()), Way(), Given(lambda text: [1, 2, 3]))
    assert counts.passes == counts.tokens == 2 * len(OUTPUT) and counts.candidates > 0 and counts.claimed > 0


def test_texts_find_earlier_texts_in_the_corpus() -> None:
    """More than are read at a time: the first ones have ended when the last ones begin."""
    texts = [Text("greedy", [200 + number], number, len(OUTPUT), plain=OUTPUT) for number in range(12)]
    alone = walk(texts, open_proposer("suffix", ProposerSettings()), Way(), Given())
    shared = walk(texts, open_proposer("suffix", ProposerSettings(corpus_tokens=10_000)), Way(), Given())
    assert alone.passes == alone.tokens == shared.tokens and shared.passes < 0.7 * alone.passes


class Reader:
    """Proposes the token that the newest row names, as a method that reads hidden states."""

    def __init__(self) -> None:
        self.firsts: list[int] = []

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        return [self._propose(context) for context in contexts]

    def _propose(self, context: ProposerContext) -> Proposal:
        (rows,) = context.hidden
        assert rows.end == context.length - 1
        self.firsts.append(rows.first)
        return Proposal([ProposedNode(-1, int(rows.states.last[-1, 0]) + 2, -0.1)], context.length)

    def close_sequence(self, handle: object) -> None:
        """Nothing is kept."""


def test_hidden_states_come_as_the_target_would_have_computed_them() -> None:
    reader = Reader()
    opened = OpenedProposer(any_vocabulary("reader"), reader, HiddenNeed(every_row=True), depth=4)
    states = torch.tensor(PROMPT + OUTPUT)[:, None]
    given = Given(states=lambda text: HiddenStates(states, {}))
    counts = walk([TEXT], opened, Way(), given)
    assert reader.firsts[:3] == [0, 2, 3], "the first guess is of the prompt's last row but one, and wrong"
    assert counts.passes == 1 + (len(OUTPUT) - 1 + 1) // 2


def test_answers_that_training_kept_are_read_with_their_states(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, "key", 3 * 4)
    rows = torch.arange(5 * 12).reshape(5, 12).to(torch.bfloat16)
    store.add("held_out", 0, [1, 2, 3, 4, 5, 6], 2, "chat", rows)
    store.add("train", 0, [1, 2, 7, 8], 2, "chat", rows[:3])
    store.add("train", 1, [1, 2, 9, 9], 2, "chat", rows[:3])
    store.finish("train")
    kept = KeptAnswers(tmp_path, 1)
    assert [(text.kind, text.prompt, text.plain) for text in kept.texts] == [
        ("greedy", [1, 2], [3, 4, 5, 6]),
        ("T = 1", [1, 2], [7, 8]),
    ]
    states = kept.states(kept.texts[0], (2, 5))
    assert torch.equal(states.last, rows[:, :4]) and torch.equal(states.layers[5], rows[:, 8:])
    assert len(kept.states(kept.texts[1], (2, 5)).last) == 3
