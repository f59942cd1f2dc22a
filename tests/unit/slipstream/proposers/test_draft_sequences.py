"""Draft models share one small KV cache among many sequences: no step fails, and what is proposed stays right."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.emulated.engine import EmulatedEngine
from slipstream.engine.engine import Engine
from slipstream.engine.factory import open_engine
from slipstream.errors import ResourceExhausted, SlipstreamError
from slipstream.proposers.base import ROOT, UNLIMITED, Proposal, ProposerContext
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.draft_sequences import IDLE_STEPS
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.checkpoints import save_checkpoint

BLOCK = 32
GREEDY = SamplingParams(temperature=0.0)
HUGE = 1 << 20


def context(handle: Hashable, tokens: list[int], **changes: object) -> ProposerContext:
    options: dict[str, object] = {"expand": [ROOT]} | changes
    return ProposerContext(handle, tokens, len(tokens), 1, HUGE, GREEDY, **options)  # type: ignore[arg-type]


def proposer_over(engine: Engine) -> ModelProposer:
    return ModelProposer(engine, width=1, proposal_tokens=1)


def emulated(blocks: int) -> EmulatedEngine:
    engine = open_engine("emulated:", kv_tokens=blocks * BLOCK)
    assert isinstance(engine, EmulatedEngine)
    return engine


def propose_one(proposer: ModelProposer, one: ProposerContext) -> Proposal:
    (answer,) = proposer.propose([one])
    assert isinstance(answer, Proposal), answer
    return answer


@dataclass
class Known:
    """A sequence as its owner knows it."""

    tokens: list[int]
    salt: str = ""
    nodes: list[int] = field(default_factory=list)


KINDS = ["open", "step", "step", "step", "commit", "replace", "close"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6)), max_size=60)


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.integers(2, 8))
def test_whatever_sequences_do_no_step_fails_and_what_is_proposed_is_right(
    events: list[tuple[str, int]], blocks: int
) -> None:
    engine = emulated(blocks)
    proposer = proposer_over(engine)
    known: dict[int, Known] = {}
    for number, (kind, seed) in enumerate(events):
        dice = random.Random(seed)
        if kind == "open":
            known[number] = Known(dice.choices(range(3), k=dice.randrange(1, 3 * BLOCK)), dice.choice(["", "red"]))
        elif kind == "step":
            some = [handle for handle in known if dice.random() < 0.7]
            step(engine, proposer, known, some, dice)
        elif known:
            handle = dice.choice(list(known))
            if kind == "commit":
                known[handle].tokens.extend(dice.choices(range(3), k=dice.randrange(1, BLOCK)))
            elif kind == "replace":
                kept = known[handle].tokens[: dice.randrange(1, len(known[handle].tokens) + 1)]
                known[handle].tokens = [*kept, *dice.choices(range(3), k=3)]
            else:
                del known[handle]
                proposer.close_sequence(handle)
        assert 0 <= engine.kv.blocks_free <= engine.kv.blocks_total
    for handle in known:
        proposer.close_sequence(handle)
        proposer.close_sequence(handle)
    assert engine.kv.blocks_free == engine.kv.blocks_total


def step(
    engine: EmulatedEngine, proposer: ModelProposer, known: dict[int, Known], some: list[int], dice: random.Random
) -> None:
    contexts = []
    for handle in some:
        nodes = dice.choices(range(3), k=dice.randrange(4))
        limit = dice.choice([1, 7, UNLIMITED])
        one = context(
            handle,
            known[handle].tokens,
            node_tokens=nodes,
            parents=[dice.randrange(-1, index) for index in range(len(nodes))],
            expand=dice.choice([[], [ROOT], list(range(-1, len(nodes)))]),
            cache_salt=known[handle].salt,
            max_read_tokens=limit,
        )
        contexts.append(one)
    for one, answer in zip(contexts, proposer.propose(contexts), strict=True):
        if isinstance(answer, SlipstreamError):
            assert isinstance(answer, ResourceExhausted) and answer.reason == "KV_EXHAUSTED"
            assert -(-(one.length + len(one.node_tokens)) // BLOCK) > engine.kv.blocks_total
        elif answer.read_tokens < one.length or not one.expand:
            assert not answer.nodes
        else:
            truth = [engine.text(one.tokens, 1 + len(one.path(node)))[-1] for node in one.expand]
            assert [(node.parent, node.token) for node in answer.nodes] == list(zip(one.expand, truth, strict=True))


def test_a_prompt_that_another_sequence_read_is_not_read_again_but_under_another_salt_it_is() -> None:
    proposer, prompt = proposer_over(emulated(20)), [5] * (4 * BLOCK)
    assert propose_one(proposer, context("first", prompt, expand=[])).read_tokens == 4 * BLOCK - 1
    propose_one(proposer, context("first", prompt))
    second = propose_one(proposer, context("second", list(prompt), max_read_tokens=1))
    assert second.read_tokens == 3 * BLOCK + 1
    other = propose_one(proposer, context("other", list(prompt), cache_salt="red", max_read_tokens=1))
    assert other.read_tokens == 1


def test_the_longest_idle_sequence_is_closed_for_another_one_and_computed_again_later() -> None:
    engine = emulated(4)
    proposer, first, second = proposer_over(engine), [5] * (3 * BLOCK), [6] * (3 * BLOCK)
    assert propose_one(proposer, context("first", first)).nodes
    for _ in range(IDLE_STEPS - 1):
        waiting = propose_one(proposer, context("second", second))
        assert waiting.no_room and not waiting.nodes
    assert propose_one(proposer, context("second", second)).nodes
    assert propose_one(proposer, context("first", first)).no_room
    proposer.close_sequence("second")
    assert propose_one(proposer, context("first", first)).nodes
    proposer.close_sequence("first")
    assert engine.kv.blocks_free == engine.kv.blocks_total


def test_a_sequence_that_no_cache_of_this_size_holds_is_refused_and_its_neighbour_served() -> None:
    proposer = proposer_over(emulated(2))
    refused, served = proposer.propose([context("long", [5] * (2 * BLOCK + 1)), context("short", [6])])
    assert isinstance(refused, ResourceExhausted) and refused.reason == "KV_EXHAUSTED"
    assert isinstance(served, Proposal) and served.nodes


def test_a_real_model_proposes_the_same_with_and_without_what_it_kept(tmp_path: Path) -> None:
    """Commits, rollbacks, shared prefixes and sequences closed for others: the rows are always those of the tokens."""
    save_checkpoint("llama", tmp_path, vocab_size=60)
    proposer, alone = (proposer_over(open_engine(str(tmp_path), "float32", 8 * BLOCK)) for _ in range(2))
    dice = random.Random(3)
    texts = {handle: dice.choices(range(4), k=dice.randrange(20, 80)) for handle in range(5)}
    proposed = 0
    for turn in range(120):
        some = dice.sample(sorted(texts), 2)
        for handle in some:
            if dice.random() < 0.2:
                texts[handle] = texts[dice.randrange(5)][: dice.randrange(1, 60)]
            texts[handle] = texts[handle][:90] if len(texts[handle]) > 100 else texts[handle]
            texts[handle].extend(dice.choices(range(4), k=dice.randrange(3)))
        nodes = {"node_tokens": dice.choices(range(4), k=2), "parents": [ROOT, 0], "expand": [ROOT, 1]}
        contexts = [context(handle, texts[handle], max_read_tokens=dice.choice([9, 500]), **nodes) for handle in some]
        for one, answer in zip(contexts, proposer.propose(contexts), strict=True):
            assert isinstance(answer, Proposal)
            if answer.nodes:
                fresh = propose_one(alone, context(turn, list(one.tokens), cache_salt=str(turn), **nodes))
                alone.close_sequence(turn)
                assert [node.token for node in answer.nodes] == [node.token for node in fresh.nodes]
                logs = [node.log_prob for node in fresh.nodes]
                assert [node.log_prob for node in answer.nodes] == pytest.approx(logs, abs=1e-3)
                proposed += 1
    assert proposed > 60
