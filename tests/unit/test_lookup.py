"""Drafters without a model: what they guess is what followed before, wherever in the tree they are asked."""

from __future__ import annotations

import pytest

from drafter_svc.proposers import Guess
from drafter_svc.proposers.corpus import Corpus
from drafter_svc.proposers.lookup import LookupProposer, NgramText, SuffixText, Text
from drafter_svc.proposers.model import ModelProposer
from drafter_svc.scheduler import Scheduler, Subscriber
from drafter_svc.session import Policy, Session
from drafter_svc.tree import Node
from slipstream.engine.thread import ModelThread
from slipstream.sampling import Sampling

LOOP = [5, 6, 7, 8, 9] * 3


def session(tokens: list[int]) -> Session:
    return Session(1, Sampling(), Policy(16, 0.01), list(tokens), len(tokens), 1000)


class Drafting:
    """A scheduler stepped by hand, without its loop."""

    def __init__(self, proposer: LookupProposer | ModelProposer, one: Session) -> None:
        self.session = one
        self.grown: list[tuple[Node, Guess]] = []
        self.thread = ModelThread()
        self.scheduler = Scheduler(proposer, self.thread, 512)
        self.scheduler.add(Subscriber(one, self.grown.extend, pytest.fail))

    def step(self) -> None:
        turns = self.scheduler._turns()
        for turn, answer in zip(turns, self.scheduler._step(turns, []), strict=True):
            self.scheduler._deliver(turn, answer)


def chain(one: Session) -> list[int]:
    """The first children, from the root down."""
    tokens, node = [], one.tree.root
    while node.children:
        node = next(iter(node.children.values()))
        tokens.append(node.token)
    return tokens


@pytest.mark.parametrize("text", [NgramText, lambda: SuffixText(None, 4, 0.05)])
async def test_a_loop_is_guessed_on(text: type[Text]) -> None:
    drafting = Drafting(LookupProposer(text, 8), session(LOOP))
    drafting.step()
    assert chain(drafting.session)[:8] == [5, 6, 7, 8, 9, 5, 6, 7]
    numbers = [node.number for node, _ in drafting.grown]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("text", [NgramText, lambda: SuffixText(None, 4, 0.05)])
async def test_commits_rollbacks_and_new_prefixes_are_followed(text: type[Text]) -> None:
    drafting = Drafting(LookupProposer(text, 4), session(LOOP))
    drafting.step()
    drafting.session.commit(len(LOOP), [5, 6])
    assert chain(drafting.session)[0] == 7
    drafting.session.commit(len(LOOP) + 2, [1])  # leaves the tree
    assert not chain(drafting.session)
    drafting.session.replace(LOOP[:-2])
    drafting.step()
    assert chain(drafting.session)[:3] == [8, 9, 5]
    drafting.session.replace([1, 2, 3, 1, 2])
    drafting.step()
    assert chain(drafting.session)[:1] == [3]


async def test_finished_sessions_feed_the_corpus_only_where_there_is_one() -> None:
    corpus = Corpus(1000)
    for shared in (corpus, None):
        proposer = LookupProposer(lambda shared=shared: SuffixText(shared, 4, 0.05), 4)  # type: ignore[misc]
        first = Drafting(proposer, session([11, 12, 13, 14, 15, 16, 17, 18]))
        first.step()
        proposer.close(first.session)
        second = Drafting(proposer, session([99, 11, 12, 13, 14]))
        second.step()
        assert (chain(second.session)[:2] == [15, 16]) == (shared is not None)
