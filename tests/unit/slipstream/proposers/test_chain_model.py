"""Chains of a draft model, proposed without reading tokens between two levels, on an engine of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.engine.devices import download
from slipstream.engine.engine import Engine, HiddenRequest, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import KVSequence, Segment
from slipstream.errors import Internal, InvalidArgument
from slipstream.proposers.base import ROOT, Proposal, ProposerContext
from slipstream.proposers.chain_model import ChainProposer
from slipstream.proposers.draft_model import ModelProposer
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.chains import LEVELS, assert_same, chain_of, context, walk

DRAFT = str(Path(__file__).resolve().parents[4] / "models" / "draft")
PROMPTS = [tuple((11 * number + 7 * place) % 4000 for place in range(20 + number)) for number in range(9)]
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=5)
PENALISED = SamplingParams(temperature=0.8, seed=5, presence_penalty=0.5)
DRAWN = SamplingParams(temperature=0.7, seed=9, acceptance="rejection")


class Chains:
    """A `ChainEngine` of an engine in this process. `computed`: tokens of each pass."""

    batch_invariant = False
    max_sequences, max_tokens, max_pending = 4, 200, 50

    def __init__(self, engine: Engine) -> None:
        self._engine, self.kv, self.model = engine, engine.kv, engine.model
        engine.batch_invariant = False
        self._last: dict[KVSequence, Segment] = {}
        self.computed: list[int] = []
        self.fetched = 0
        self.broken = False

    def forward(self, segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        self._last = {each.sequence: each for each in segments}
        self.computed.append(sum(each.computed for each in segments))
        assert len(segments) <= self.max_sequences and self.computed[-1] <= self.max_tokens
        return self._engine.forward(segments)

    def extend(self, sequences: Sequence[KVSequence], tokens: Tensor) -> Tensor:
        segments = []
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            last = self._last[sequence]
            nodes, parents = [*last.nodes, token], [*last.parents, len(last.nodes) - 1]
            segments.append(Segment(sequence, last.pending, nodes, parents, wanted=[len(nodes) - 1], held=last.tokens))
        logits = self.forward(segments).logits
        return torch.full_like(logits, torch.nan) if self.broken else logits

    def fetch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.fetched += 1
        return download(*tensors)


@pytest.fixture(scope="module")
def model() -> ModelProposer:
    return ModelProposer(open_engine(DRAFT, "float32", 8192), width=4, proposal_tokens=32, sharpness=1.5)


@pytest.fixture
def engine() -> Chains:
    return Chains(open_engine(DRAFT, "float32", 4096))


@pytest.fixture
def chains(engine: Chains) -> ChainProposer:
    return ChainProposer(engine, width=4, proposal_tokens=32, sharpness=1.5)


def test_chains_and_siblings_are_those_of_a_tree_grown_level_by_level(
    engine: Chains, chains: ChainProposer, model: ModelProposer
) -> None:
    """In several passes, read by one copy. Under penalties and where nodes are drawn a call goes one level deep."""
    samplings = (GREEDY, SAMPLED, PENALISED, DRAWN, GREEDY)
    asked = [
        context(number, list(prompt), len(prompt), sampling, LEVELS)
        for number, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=False))
    ]
    for one, answer in zip(asked, chains.propose(asked), strict=True):
        levels = 1 if one.sampling in (PENALISED, DRAWN) else LEVELS
        assert isinstance(answer, Proposal) and answer.levels == levels and answer.read_tokens == one.length
        assert_same(
            answer.nodes, chain_of(model, context(one.handle, one.tokens, one.prompt_length, one.sampling, levels))
        )
        model.close_sequence(one.handle)
    assert engine.fetched == 1 and len(engine.computed) == 2 * LEVELS


def test_roots_move_branches_change_and_sessions_roll_back(
    engine: Chains, chains: ChainProposer, model: ModelProposer
) -> None:
    assert walk(chains, model, PROMPTS, steps=12, compared_every=1) > 60
    assert engine.kv.blocks_free == engine.kv.blocks_total


def test_tokens_that_a_chain_computed_are_not_computed_again(engine: Chains, chains: ChainProposer) -> None:
    text = list(PROMPTS[0])
    (answer,) = chains.propose([context("s", text, len(text), GREEDY, LEVELS)])
    assert isinstance(answer, Proposal) and engine.computed == [len(text), 1, 1, 1]
    engine.computed.clear()
    text += [answer.nodes[number].token for number in (0, 4, 8, 12)] + [7]
    chains.propose([context("s", text, len(text), GREEDY, LEVELS)])
    assert engine.computed == [2, 1, 1, 1]  # the last of the chain was proposed, not computed


def test_a_prompt_is_read_in_parts_without_logits(engine: Chains, chains: ChainProposer) -> None:
    text = list(range(1, 121))
    reading = ProposerContext("s", text, len(text), len(text), 200, GREEDY)
    answers = [chains.propose([reading])[0] for _ in range(4)]
    assert [answer.read_tokens for answer in answers if isinstance(answer, Proposal)] == [50, 100, 119, 119]
    assert engine.computed == [50, 50, 19] and engine.fetched == 0


def test_levels_that_find_no_room_are_left_out(engine: Chains, chains: ChainProposer) -> None:
    """One block of tokens is left, and the chain would go beyond it."""
    size = engine.kv.block_size
    engine.kv.begin_unshared(engine.kv.blocks_free * size - size)
    text = list(range(1, size - 1))
    (answer,) = chains.propose([context("s", text, len(text), GREEDY, LEVELS)])
    assert isinstance(answer, Proposal) and answer.levels == 1 and len(answer.nodes) == 4


def test_numbers_that_are_broken_end_the_session(engine: Chains, chains: ChainProposer) -> None:
    engine.broken = True  # from the second level on
    (answer,) = chains.propose([context("s", list(PROMPTS[0]), 9, SAMPLED, LEVELS)])
    assert isinstance(answer, Internal) and answer.reason == "BROKEN_NUMBERS"


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED])
def test_a_request_that_allows_no_token_of_a_head_with_fewer_tokens_gets_no_candidates(
    engine: Chains, chains: ChainProposer, asked: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.forward

    def of_few(segments: list[Segment], hidden: HiddenRequest | None = None) -> ModelOutput:
        output = forward(segments, hidden)
        output.logits[:, 50:] = -torch.inf
        return output

    monkeypatch.setattr(engine, "forward", of_few)
    for allowed, some in (((70, 90), False), ((7, 90), True)):
        sampling = replace(asked, allowed_token_ids=allowed)
        (answer,) = chains.propose([context(f"{allowed}", list(PROMPTS[0]), 9, sampling, LEVELS)])
        assert isinstance(answer, Proposal) and bool(answer.nodes) == some


def test_more_than_one_node_to_expand_is_refused(chains: ChainProposer) -> None:
    asked = ProposerContext("s", [1, 2], 2, 2, 9, GREEDY, [5], [ROOT], expand=[ROOT, 0])
    (answer,) = chains.propose([asked])
    assert isinstance(answer, InvalidArgument) and "DRAFTER_EXPAND" in answer.message
