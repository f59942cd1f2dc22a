"""A draft model on vLLM proposes in float32 what the embedded engine's chain is, whatever the tree did before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.engine.factory import open_engine
from slipstream.errors import InvalidArgument
from slipstream.proposers.base import Proposal, ProposedNode, ProposerContext
from slipstream.proposers.chain_model import ChainProposer
from slipstream.proposers.draft_model import ModelProposer
from slipstream.speculation.sampling_params import SamplingParams
from tests.support.chains import LEVELS, assert_same, chain_of, context, walk
from tests.vllm.decoding import DRAFT, SAMPLINGS, prompts

PLACES, STEP_TOKENS, KV_TOKENS = 8, 64, 4096
DRAWN = SamplingParams(temperature=0.7, seed=9, acceptance="rejection")
GREEDY, SAMPLED = SAMPLINGS[0], SAMPLINGS[1]


def open_draft(**changes: Any) -> Any:
    from slipstream.engine.vllm.engine import DraftOptions, open_vllm_engine

    given = DraftOptions(DRAFT, "float32", KV_TOKENS, STEP_TOKENS, vllm_args=f"--max-num-seqs {PLACES}")
    return open_vllm_engine(given._replace(**changes))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    opened = open_draft()
    yield opened
    opened.close()


@pytest.fixture
def chains(engine: Any) -> Iterator[ChainProposer]:
    proposer = ChainProposer(engine, width=4, proposal_tokens=32, sharpness=1.5)
    yield proposer
    for handle in list(proposer._ahead):
        proposer.close_sequence(handle)
    assert engine.kv.blocks_free == engine.kv.blocks_total


@pytest.fixture(scope="module")
def embedded() -> ModelProposer:
    return ModelProposer(open_engine(DRAFT, "float32", 16_384), width=4, proposal_tokens=32, sharpness=1.5)


def nodes_of(answer: object) -> list[ProposedNode]:
    assert isinstance(answer, Proposal), answer
    return answer.nodes


def test_chains_and_siblings_are_those_of_the_embedded_engine(chains: ChainProposer, embedded: ModelProposer) -> None:
    """All samplings in one call. Under penalties and where nodes are drawn a call goes one level deep."""
    asked = [
        context(number, list(prompt), len(prompt), sampling, LEVELS)
        for number, (prompt, sampling) in enumerate(zip(prompts(9), (*SAMPLINGS, DRAWN), strict=True))
    ]
    for one, answer in zip(asked, chains.propose(asked), strict=True):
        levels = 1 if one.sampling.penalised or one.sampling.drawn else LEVELS
        assert isinstance(answer, Proposal) and answer.levels == levels and answer.read_tokens == one.length
        alone = context(one.handle, one.tokens, one.prompt_length, one.sampling, levels)
        assert_same(answer.nodes, chain_of(embedded, alone))


def test_roots_move_branches_change_and_sessions_roll_back(chains: ChainProposer, embedded: ModelProposer) -> None:
    """More sessions than the runner has places take turns; each chain is what a model without a past proposes."""
    assert walk(chains, embedded, prompts(PLACES + 3), steps=9, compared_every=3) > 15


def counted(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass from now on."""
    sizes: list[int] = []
    compute = engine._runner.compute

    def counting(output: Any) -> Any:
        sizes.append(output.total_num_scheduled_tokens)
        return compute(output)

    monkeypatch.setattr(engine._runner, "compute", counting)
    return sizes


def test_tokens_that_a_chain_computed_are_not_computed_again(
    engine: Any, chains: ChainProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(prompts(1)[0])
    sizes = counted(engine, monkeypatch)
    first = nodes_of(chains.propose([context("s", prompt, len(prompt), GREEDY, LEVELS, salt="alone")])[0])
    assert sizes == [len(prompt), 1, 1, 1]
    best = [node.token for number, node in enumerate(first) if number in (0, 4, 8, 12)]
    sizes.clear()
    prompt += best  # all of it is accepted, and another token
    prompt.append(7)
    chains.propose([context("s", prompt, len(prompt) - 5, GREEDY, LEVELS, salt="alone")])
    assert sizes == [2, 1, 1, 1]  # the last of the chain was proposed, not computed
    sizes.clear()
    chains.propose([context("s", prompt, len(prompt) - 5, GREEDY, 1, salt="alone")])
    assert sizes == [1]


def test_sequences_of_one_salt_share_a_prefix(
    engine: Any, chains: ChainProposer, embedded: ModelProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = engine.kv.block_size
    prompt = [token for each in prompts(16) for token in each][: 2 * size + 5]
    sizes = counted(engine, monkeypatch)
    computed: list[int] = []
    for handle, salt in (("first", "a"), ("second", "a"), ("third", "b")):
        asked = context(handle, list(prompt), len(prompt), SAMPLED, 2, salt=salt)
        answer, sizes[:] = Proposal([], 0), []
        while answer.read_tokens < len(prompt):  # by parts of a step
            (found,) = chains.propose([asked])
            assert isinstance(found, Proposal)
            answer = found
        computed.append(sum(sizes) - 1)
        assert_same(answer.nodes, chain_of(embedded, asked))
        embedded.close_sequence(handle)
    assert computed == [len(prompt), 5, len(prompt)]


def test_a_prompt_is_read_in_parts_and_a_step_may_take_several_passes(
    engine: Any, chains: ChainProposer, embedded: ModelProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [list(prompt) for prompt in prompts(PLACES + 1)]
    reading = [
        ProposerContext(number, text, len(text), len(text), len(text) + 9, GREEDY, max_read_tokens=10)
        for number, text in enumerate(texts)
    ]
    sizes = counted(engine, monkeypatch)
    assert [answer.read_tokens for answer in chains.propose(reading) if isinstance(answer, Proposal)] == [10] * 9
    assert sizes == [80, 10]
    sizes.clear()
    asked = [context(number, text, len(text), GREEDY, 2) for number, text in enumerate(texts)]
    answers = chains.propose(asked)
    assert sum(sizes) == sum(len(text) - 10 + 1 for text in texts)
    assert max(sizes) <= engine.max_tokens
    for one, answer in zip(asked, answers, strict=True):
        assert_same(nodes_of(answer), chain_of(embedded, one))
        embedded.close_sequence(one.handle)


def test_a_call_takes_its_tokens_to_the_host_once(
    engine: Any, chains: ChainProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    fetch = engine.fetch
    monkeypatch.setattr(engine, "fetch", lambda *given: fetched.append(len(given)) or fetch(*given))
    asked = [context(number, list(prompt), len(prompt), SAMPLED, LEVELS) for number, prompt in enumerate(prompts(3))]
    chains.propose(asked)
    assert fetched == [2 * LEVELS]


def test_after_a_pass_that_failed_all_is_sent_anew(
    engine: Any, chains: ChainProposer, embedded: ModelProposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [list(prompt) for prompt in prompts(2)]
    asked = [context(number, text, len(text), SAMPLED, LEVELS) for number, text in enumerate(texts)]
    chains.propose(asked)
    for fails in ("prepare_inputs", "update_requests"):
        with monkeypatch.context() as patched:
            patched.setattr(engine._runner, fails, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                chains.propose([context("new", texts[0], len(texts[0]), SAMPLED, LEVELS), *asked])
        for one, answer in zip(asked, chains.propose(asked), strict=True):
            assert_same(nodes_of(answer), chain_of(embedded, one))
    chains.close_sequence("new")
    for one in asked:
        embedded.close_sequence(one.handle)


def test_a_sequence_without_room_waits(chains: ChainProposer) -> None:
    text = [5] * 900
    for number in range(3):
        reading = ProposerContext(
            number, text, len(text), len(text), 1000, GREEDY, max_read_tokens=STEP_TOKENS, cache_salt=str(number)
        )
        for _ in range(15):
            chains.propose([reading])
    more = context("more", [5] * 1500, 1500, GREEDY, salt="more")
    answers = [chains.propose([more])[0] for _ in range(30)]
    read = [answer.read_tokens for answer in answers if isinstance(answer, Proposal) and not answer.no_room]
    assert len(read) < 30 and read[-1] == KV_TOKENS - 3 * 1024  # a whole number of blocks
    chains.close_sequence(0)
    (answer,) = chains.propose([more])
    assert isinstance(answer, Proposal) and answer.read_tokens > read[-1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--tensor-parallel-size 2", "DRAFTER_VLLM_ARGS holds --tensor-parallel-size, .*: a draft model runs on one"),
        ("--dtype float32", "DRAFTER_VLLM_ARGS holds --dtype, which cannot be set: it is DRAFTER_DTYPE"),
        ("--no-such-option", "DRAFTER_VLLM_ARGS cannot be read: unrecognized arguments: --no-such-option"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        open_draft(vllm_args=options)


def test_quantisation_of_the_embedded_engine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="DRAFTER_QUANTISATION is for the embedded engine"):
        open_draft(quantisation="int8")
