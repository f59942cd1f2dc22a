"""Drafters without a model: what they guess is what followed before, wherever in the tree they are asked."""

from __future__ import annotations

import math

import pytest

from drafter_svc.config import DrafterConfig
from slipstream.proposers.base import ProposerContext, ProposerSettings, open_proposer
from slipstream.proposers.corpus import Corpus
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.draft_tree import DraftNode
from slipstream.proposers.drafting.scheduler import DraftScheduler, Subscriber
from slipstream.proposers.drafting.session import DraftPolicy, DraftSession
from slipstream.proposers.drafting.step import DraftStepLimits
from slipstream.proposers.lookahead import LookaheadProposer
from slipstream.proposers.lookup import LookupProposer
from slipstream.proposers.suffix import CHUNK, SuffixText, TreeBounds
from slipstream.speculation.lookahead_window import LookaheadSize
from slipstream.speculation.sampling_params import SamplingParams

BOUNDS = TreeBounds(4, 0.05)
LOOP = [5, 6, 7, 8, 9] * 3


def session(tokens: list[int]) -> DraftSession:
    return DraftSession(1, SamplingParams(), DraftPolicy(16, 0.01), list(tokens), len(tokens), 1000)


class Drafting:
    """A scheduler stepped by hand, without its loop."""

    def __init__(self, proposer: LookupProposer | ModelProposer, one: DraftSession) -> None:
        self.session = one
        self.grown: list[DraftNode] = []
        self.scheduler = DraftScheduler(proposer, DraftStepLimits(512))
        self.scheduler.add_session(Subscriber(one, self.grown.extend, pytest.fail))

    def step(self) -> None:
        requests = self.scheduler._schedule_step()
        for request, answer in zip(requests, self.scheduler._run_step(requests, []), strict=True):
            self.scheduler._deliver(request, answer)


def chain(one: DraftSession) -> list[int]:
    """The first children, from the root down."""
    tokens, node = [], one.tree.root
    while node.children:
        node = next(iter(node.children.values()))
        tokens.append(node.token)
    return tokens


def open_text(context: ProposerContext) -> SuffixText:
    return SuffixText(None, BOUNDS, 0)


async def test_a_repeating_text_is_drafted_beyond_one_period() -> None:
    drafting = Drafting(LookupProposer(open_text), session(LOOP))
    drafting.step()
    assert chain(drafting.session)[:8] == [5, 6, 7, 8, 9, 5, 6, 7]
    numbers = [node.number for node in drafting.grown]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_lookup_candidates_follow_commits() -> None:
    drafting = Drafting(LookupProposer(open_text), session(LOOP))
    drafting.step()
    drafting.session.commit(len(LOOP), [5, 6])
    assert chain(drafting.session)[0] == 7
    drafting.session.commit(len(LOOP) + 2, [1])  # leaves the tree
    assert not chain(drafting.session)
    drafting.session.commit(len(LOOP) + 3, [5, 6])
    drafting.step()
    assert chain(drafting.session)[:3] == [7, 8, 9]


def test_confidence_is_lower_at_a_higher_temperature() -> None:
    """The first candidate's claim, of a match of two tokens that occurred once: SmolLM2's texts accept half of what is
    claimed without this at temperature 0.8, and a third at 1."""
    claims = []
    for temperature in (0.0, 0.8, 1.0):
        one = DraftSession(1, SamplingParams(temperature=temperature), DraftPolicy(16, 0.01), [5, 6, 7, 1, 5, 6], 6, 99)
        drafting = Drafting(open_proposer("suffix", ProposerSettings()).proposer, one)
        drafting.step()
        claims.append(math.exp(next(drafting.session.tree.nodes()).log_prob))
    assert claims == pytest.approx([1 / 2, 1 / 3.28, 1 / 4])


def test_ngrams_of_a_window_have_a_lowered_confidence_too() -> None:
    pool = LookaheadProposer(LookaheadSize(4, 3, 3))
    drafting = Drafting(pool, session([5, 6, 7, 1, 5]))
    drafting.step()
    assert math.exp(next(drafting.session.tree.nodes()).log_prob) == pytest.approx(1 / 7)


def guesses(text: SuffixText, tokens: list[int]) -> list[int]:
    """The first guess, and those on its path."""
    text.read(tokens)
    return [node.token for index, node in enumerate(text.look_up([], 4)) if node.parent == index]


def test_sessions_feed_their_corpus_with_output_but_not_with_prompts() -> None:
    corpus = Corpus(10_000)
    first = SuffixText(corpus, BOUNDS, first=3)
    first.read([1, 2, 3, 11, 12, 13, 14, 15, 16])
    assert guesses(SuffixText(corpus, BOUNDS, 0), [99, 12, 13]) == []
    first.finish()
    assert guesses(SuffixText(corpus, BOUNDS, 0), [99, 12, 13])[:3] == [14, 15, 16]
    assert guesses(SuffixText(corpus, BOUNDS, 0), [99, 1, 2]) == []
    assert guesses(SuffixText(None, BOUNDS, 0), [99, 12, 13]) == []


def test_a_corpus_grows_while_a_session_runs_and_its_parts_hang_together() -> None:
    corpus = Corpus(10_000)
    writing = SuffixText(corpus, BOUNDS, first=1)
    writing.read([99])
    written = list(range(1000, 1000 + 2 * CHUNK))
    for token in written:
        writing.read([token])
    assert guesses(SuffixText(corpus, BOUNDS, 0), written[CHUNK - 3 : CHUNK])[:1] == [written[CHUNK]]
    held = len(corpus)
    writing.finish()
    assert len(corpus) == held  # nothing is given twice


async def test_sessions_share_a_corpus_only_under_one_salt_unless_sharing_is_enabled() -> None:
    for settings, salts, meet in (
        ({}, ("red", "red"), True),
        ({}, ("red", "blue"), False),
        ({}, ("", ""), False),
        ({"corpus_shared": True}, ("red", ""), True),
        ({"corpus_tokens": 0}, ("red", "red"), False),
    ):
        config = DrafterConfig(method="suffix", **{"corpus_tokens": 1000, **settings})
        proposer = open_proposer(config.method, config.proposer_settings()).proposer
        assert isinstance(proposer, LookupProposer)
        one, other = (session([1]), session([99]))
        one.cache_salt, other.cache_salt = salts
        writing, reading = Drafting(proposer, one), Drafting(proposer, other)
        writing.step()
        one.commit(1, [11, 12, 13, 14, 15, 16])
        writing.step()
        proposer.close_sequence(one)
        reading.step()
        other.commit(1, [11, 12, 13])
        reading.step()
        assert (chain(other)[:2] == [14, 15]) == meet, (settings, salts)
