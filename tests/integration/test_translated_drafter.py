"""A drafter whose tokenizer is not the target's: what it guesses, and that no text changes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.processes import MODELS
from benchmarks.prompts import held_out
from benchmarks.translation import agreement, permuted, runs
from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import open_configured
from drafter_svc.drafter import running as drafter_running
from slipstream.engine.engine import Engine, ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, SlipstreamError
from slipstream.proposers.base import UNLIMITED, Proposal, ProposedNode, ProposerContext
from slipstream.proposers.cross_vocabulary.spelling import Spelling
from slipstream.proposers.cross_vocabulary.translated import TranslatedProposer
from slipstream.proposers.cross_vocabulary.translation import Translation
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.rpc.proto_conversion import model_to_proto
from slipstream.serving.fit import check_fit
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.vocabulary import fingerprint, load_tokenizer
from tests.support.checkpoints import save_checkpoint
from tests.support.fleet import Decoded, gateway, in_time, slowed, verifier
from tests.unit.slipstream.proposers.cross_vocabulary.test_translation import LINES, byte_level

TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
TOKENS = 16
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=2**63 + 5),
    SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, logit_bias={300: 2.0}, seed=11
    ),
]


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped draft model under other token ids."""
    return str(permuted(MODELS / "draft", tmp_path_factory.mktemp("drafts") / "permuted"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield slowed(open_engine(TARGET, "float32"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(TARGET)
    return [tokenizer.encode(text).ids for text in held_out(3, seed=5)]


def config(model: str, **settings: object) -> DrafterConfig:
    return DrafterConfig(model=model, dtype="float32", listen="127.0.0.1:0", grace_s=0.0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_translated_drafter_guesses_as_well_as_the_same_model_untranslated(
    shuffled: str, engine: Engine, temperature: float
) -> None:
    some = runs(engine, held_out(5, seed=5), temperature, TOKENS)
    plain = open_configured(config(DRAFT)).proposer
    translated = open_configured(config(shuffled, translate_for=TARGET)).proposer
    for with_translation, without in zip(agreement(translated, some), agreement(plain, some), strict=True):
        assert with_translation >= without - 0.05 > 0.4


async def decode(
    engine: Engine, prompt: list[int], sampling: SamplingParams, drafter: str = "", trusted: bool = False
) -> Decoded:
    async with verifier(engine) as server, gateway(server.address) as client:
        drafters = [drafter] if drafter else []
        return await client.decode(prompt, tokens=TOKENS, sampling=sampling, drafters=drafters, trusted=trusted)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_translated_drafter_changes_no_text(
    shuffled: str, engine: Engine, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    plain = [(await decode(engine, prompt, sampling)).token_ids for prompt in prompts]
    async with drafter_running(config(shuffled, translate_for=TARGET)) as drafter:

        async def helps() -> bool:
            drafted = [await decode(engine, prompt, sampling, drafter.address) for prompt in prompts]
            assert [decoded.token_ids for decoded in drafted] == plain
            assert not any(event.failure.message for decoded in drafted for event in decoded.events)
            return sum(decoded.accepted for decoded in drafted) > 0

        assert await in_time(helps)


async def test_the_ratio_rule_gets_an_honest_distribution_over_target_tokens(
    shuffled: str, engine: Engine, prompts: list[list[int]]
) -> None:
    """The verifier checks each: known tokens, positive weights, the drafted token among them."""
    decoded: list[Decoded] = []
    async with drafter_running(config(shuffled, translate_for=TARGET)) as drafter:
        for seed in range(40):  # which candidates come in time is chance, and so is what is accepted of them
            sampling = SamplingParams(temperature=1.0, seed=seed, acceptance="rejection")
            prompt = prompts[seed % len(prompts)]
            decoded.append(await decode(engine, prompt, sampling, drafter.address, trusted=True))
            if sum(one.accepted for one in decoded) > 5:
                break
    assert all(len(one.token_ids) == TOKENS for one in decoded)
    assert sum(one.accepted for one in decoded) > 5
    assert not any(event.failure.message for one in decoded for event in one.events)


async def test_without_translation_the_refusal_names_both_vocabularies(
    shuffled: str, engine: Engine, prompts: list[list[int]]
) -> None:
    mine, theirs = fingerprint(load_tokenizer(shuffled)), fingerprint(load_tokenizer(TARGET))
    async with drafter_running(config(shuffled)) as drafter, verifier(engine) as server:
        async with gateway(server.address) as client:
            decoded = await client.decode(prompts[0], tokens=4, drafters=[drafter.address])
        with pytest.raises(FailedPrecondition, match=f"{mine}.*{theirs}.*--translate"):
            await check_fit(server.address, [drafter.address])
    (failure,) = (event.failure for event in decoded.events if event.failure.message)
    assert mine in failure.message and theirs in failure.message
    assert decoded.drafted == 0 and len(decoded.token_ids) == 4


async def test_a_translating_drafter_fits_its_own_target_and_no_other(shuffled: str, engine: Engine) -> None:
    announced = open_configured(config(shuffled, translate_for=TARGET)).model
    assert announced.fingerprint == engine.model.fingerprint
    assert announced.vocabulary_size == load_tokenizer(TARGET).get_vocab_size()
    assert announced.name == Path(shuffled).name
    same = open_configured(config(DRAFT, translate_for=TARGET)).model
    assert model_to_proto(same) == model_to_proto(open_engine(DRAFT, "float32").model)


def test_only_a_model_can_translate() -> None:
    with pytest.raises(InvalidArgument, match="DRAFTER_TRANSLATE_FOR"):
        DrafterConfig(method="ngram", translate_for=TARGET)


VOCABULARY = 340


def random_drafter(folder: Path, tokenizer: Tokenizer) -> Path:
    save_checkpoint("llama", folder, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that spells everything in single bytes: a draft text is many times as long as the target's."""
    return random_drafter(tmp_path_factory.mktemp("tiny") / "bytes", byte_level(257, ["<|end|>"]))


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose last tokens change with what follows them."""
    return random_drafter(tmp_path_factory.mktemp("tiny") / "merging", byte_level(420, ["<|end|>"], regex=False))


def tiny_proposer(folder: Path, target: Tokenizer | None = None) -> TranslatedProposer:
    engine = open_engine(str(folder), "float32", 4096)
    pair = Translation(Spelling(target or target_tokenizer()), Spelling(load_tokenizer(str(folder))))
    return TranslatedProposer(engine, pair, width=3, proposal_tokens=8)


def target_tokenizer() -> Tokenizer:
    return byte_level(VOCABULARY, ["<|end|>", "<|mark|>"])


def new_session(tokens: list[int], max_length: int = 80) -> DraftSession:
    return DraftSession(
        1, SamplingParams(temperature=1.0, seed=5), DraftPolicy(16, 0.0), tokens, len(tokens), max_length
    )


def context_of(session: DraftSession, chance: random.Random, text: Sequence[int] = (0,)) -> ProposerContext:
    """As the scheduler makes it, with a random tree: below the root some of the tokens of the text, or any."""
    nodes: list[DraftNode] = []
    for _ in range(chance.randrange(4)):
        above = chance.choice([session.tree.root, *nodes])
        depth = len(session.tokens) + above.depth - session.tree.root.depth
        token = text[depth % len(text)] if chance.random() < 0.8 else chance.randrange(257)
        if node := session.tree.add(above, token, -0.5):
            nodes.append(node)
    nodes = list(session.tree.nodes())
    expand = sorted(chance.sample(range(-1, len(nodes)), min(2, 1 + len(nodes))))
    starts = [session.tree.root if index < 0 else nodes[index] for index in expand]
    return session.context(nodes, starts, UNLIMITED)


def proposed(answer: Proposal | SlipstreamError) -> list[ProposedNode]:
    assert isinstance(answer, Proposal), answer
    return answer.nodes


def assert_same(some: list[ProposedNode], others: list[ProposedNode]) -> None:
    assert [node.token for node in some] == [node.token for node in others]
    assert [node.log_prob for node in some] == pytest.approx([node.log_prob for node in others], abs=0.01)


def alone(proposer: TranslatedProposer, tokens: list[int]) -> list[ProposedNode]:
    """What a session that begins with the tokens is proposed."""
    fresh = new_session(tokens)
    (answer,) = proposer.propose([fresh.context([], [fresh.tree.root], UNLIMITED)])
    proposer.close_sequence(fresh)
    return proposed(answer)


@pytest.mark.parametrize(("target", "draft"), [(VOCABULARY, "tiny"), (257, "merging")])
def test_state_kept_between_passes_never_changes_a_candidate(
    target: int, draft: str, request: pytest.FixtureRequest
) -> None:
    """Several sessions in a pass, nodes of their trees, commits, rollbacks, text that outgrows what was reserved:
    yet a session that begins with a node's text gets the same guesses."""
    chance = random.Random(7)
    tokenizer = byte_level(target, ["<|end|>"])
    proposer = tiny_proposer(request.getfixturevalue(draft), tokenizer)
    text = tokenizer.encode(LINES[3]).ids
    engine = proposer._engine
    sessions = [new_session(text[: 3 + number]) for number in range(3)]
    for _ in range(15):
        contexts = [context_of(session, chance, text) for session in sessions]
        answers = proposer.propose(contexts)
        for context, answer in zip(contexts, answers, strict=True):
            for index in context.expand:
                below = [node for node in proposed(answer) if node.parent == index]
                assert_same(below, alone(proposer, context.tokens + context.path(index)))
            assert all(0 <= node.token < target for node in proposed(answer))
        for number, session in enumerate(sessions):
            fresh = text[len(session.tokens) :][: chance.randrange(1, 4)]
            if chance.random() < 0.2 or not fresh:
                fresh = chance.choices(range(257), k=3)
                proposer.close_sequence(session)  # a rollback: it is opened again
                sessions[number] = new_session(session.tokens[: chance.randrange(1, len(session.tokens) + 1)] + fresh)
            else:
                session.commit(len(session.tokens), fresh)
    for session in sessions:
        proposer.close_sequence(session)
        proposer.close_sequence(session)
    assert engine.kv.blocks_free == engine.kv.blocks_total


def test_a_session_that_the_draft_model_cannot_hold_is_refused_and_its_neighbour_served(tiny: Path) -> None:
    longest = json.loads((tiny / "config.json").read_text())["max_position_embeddings"]
    proposer = tiny_proposer(tiny)
    long = new_session(target_tokenizer().encode("self " * (longest // 4)).ids, 10_000)
    short = new_session(target_tokenizer().encode("self").ids)
    chance = random.Random(1)
    refused, served = proposer.propose([context_of(long, chance), context_of(short, chance)])
    assert isinstance(refused, ResourceExhausted) and str(longest) in refused.message
    assert proposed(served)


def test_a_text_that_the_drafter_cannot_read_gets_no_guess(tiny: Path) -> None:
    """Nothing but a chat mark that the draft model has no token for."""
    proposer = tiny_proposer(tiny)
    mark = target_tokenizer().token_to_id("<|mark|>")
    (answer,) = proposer.propose([context_of(new_session([mark]), random.Random(3))])
    assert proposed(answer) == []


def test_broken_numbers_of_a_translating_drafter_fail_its_session_with_a_reason(tiny: Path) -> None:
    proposer = tiny_proposer(tiny)
    forward = proposer._engine.forward
    proposer._engine.forward = lambda segments: ModelOutput(torch.full_like(forward(segments).logits, torch.nan))  # type: ignore[method-assign]
    (answer,) = proposer.propose([context_of(new_session([70, 71]), random.Random(1))])
    assert isinstance(answer, SlipstreamError) and answer.reason == "BROKEN_NUMBERS"


def test_a_long_prompt_is_read_in_parts(tiny: Path) -> None:
    proposer = tiny_proposer(tiny)
    prompt = target_tokenizer().encode("def read(self, path): return open(path)").ids
    parts = new_session(prompt)
    for stop in range(3, len(prompt), 3):
        assert proposer.propose([parts.context([], [], 3)]) == [Proposal([], stop)]
    chance = random.Random(2)
    whole = new_session(prompt)
    last = context_of(parts, chance)
    first = replace(last, handle=whole, tokens=list(prompt))
    some, others = proposer.propose([last, first])
    assert_same(proposed(some), proposed(others))
