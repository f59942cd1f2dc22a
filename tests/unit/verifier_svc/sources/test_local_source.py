"""A draft model or a head inside the verifier: whose nodes a pass expands, when, and what it is still asked for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.proposers.base import (
    ROOT,
    HiddenNeed,
    HiddenRows,
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    any_vocabulary,
)
from slipstream.proposers.drafting.step import PASS_NODES
from slipstream.proposers.registry import METHODS
from slipstream.v1 import types_pb2
from tests.support.verifier_sessions import new_session
from verifier_svc.session import Session
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.local import LocalSource

VOCABULARY = 100
Guess = tuple[int, int, float]
"""Index of the parent among the guesses or ROOT, token, and probability given the parent."""


class Guesses:
    """A proposer that guesses below the root alone, by the text's first token."""

    def __init__(self, below: Callable[[int], list[Guess]]) -> None:
        self._below = below
        self.passes: list[list[ProposerContext]] = []
        self.closed: set[Hashable] = set()

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        self.passes.append(contexts)
        return [Proposal(self._nodes(each) if ROOT in each.expand else [], each.length) for each in contexts]

    def _nodes(self, context: ProposerContext) -> list[ProposedNode]:
        guesses, first = self._below(context.tokens[0]), len(context.node_tokens)
        return [
            ProposedNode(parent if parent == ROOT else first + parent, token, math.log(sure))
            for parent, token, sure in guesses
        ]

    def close_sequence(self, handle: Hashable) -> None:
        self.closed.add(handle)


class SameThread:
    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(function(*args))
        return future


def new_source(proposer: Guesses, least: float) -> tuple[LocalSource, CandidateSources]:
    sources = CandidateSources(types_pb2.ModelInfo(vocabulary_size=VOCABULARY), least)
    opened = OpenedProposer(any_vocabulary("model"), proposer)
    return LocalSource(METHODS["model"], opened, sources.context, SameThread(), None), sources  # type: ignore[arg-type]


class Rows:
    """Hidden states of all tokens but the last, which are there once it is committed."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def end(self) -> int:
        return len(self._session.tokens) - 1

    def take(self) -> tuple[HiddenRows, ...]:
        return ()


def new_head(proposer: Guesses) -> tuple[LocalSource, CandidateSources]:
    sources = CandidateSources(types_pb2.ModelInfo(vocabulary_size=VOCABULARY), 0.02)
    opened = OpenedProposer(any_vocabulary("eagle"), proposer, HiddenNeed((1,), every_row=True), 8)
    feed: Any = SimpleNamespace(subscribe=lambda session, need: Rows(session), unsubscribe=lambda *_: None)
    thread: Any = SameThread()
    return LocalSource(METHODS["eagle"], opened, sources.context, thread, feed), sources


async def drafted(source: LocalSource) -> None:
    """Until nothing is left to draft."""
    running = asyncio.create_task(source.run())
    await asyncio.sleep(0)
    running.cancel()


def committed(source: LocalSource, session: Session, *tokens: int) -> None:
    session.commit(list(tokens), 0)
    source.root_moved(session)


async def test_the_likeliest_nodes_of_all_sessions_share_a_pass() -> None:
    sure, sessions = 1, 30
    proposer = Guesses(
        lambda text: [(ROOT, token, 0.24 if text == sure else 0.05) for token in range(1, 5)],
    )
    source, _ = new_source(proposer, 0.02)
    for number in range(sessions):
        source.open(new_session([sure if number == sessions // 2 else 2]), "model")
    await drafted(source)
    roots, below, *_ = ({each.handle: len(each.expand) for each in contexts} for contexts in proposer.passes)
    assert set(roots.values()) == {1} and len(roots) == sessions
    expanded = {each.handle: each.tokens[0] for each in proposer.passes[1]}
    assert [below[handle] for handle, text in expanded.items() if text == sure] == [4]
    assert sum(below.values()) == PASS_NODES and min(below.values()) == 1


async def test_a_session_that_a_late_candidate_costs_its_drafter_is_drafted_for_no_more() -> None:
    """What a commit makes likely is sent then: a token that the target does not have ends the drafting there."""
    proposer = Guesses(lambda text: [(ROOT, 7, 0.5), (0, VOCABULARY, 0.5)])
    source, _ = new_source(proposer, 0.3)
    session = new_session([1, 2])
    source.open(session, "model")
    await drafted(source)
    assert session.tree.select_first_children(2).token_ids == (7,)
    committed(source, session, 7)
    before = len(proposer.passes)
    await drafted(source)
    assert len(proposer.closed) == 1 and len(proposer.passes) == before


async def test_a_head_proposes_once_a_step_is_held_for_it() -> None:
    """Beside a pass it would take several times as long, and its candidates would come for a root that is gone."""
    proposer = Guesses(lambda text: [(ROOT, 7, 0.5)])
    source, _ = new_head(proposer)
    session = new_session([1, 2])
    source.open(session, "eagle")
    await drafted(source)
    assert not proposer.passes and source.awaited(session) is not None
    source.step_held(session)
    await drafted(source)
    assert len(proposer.passes) == 1 and session.tree.select_first_children(1).token_ids == (7,)
    assert source.awaited(session) is None, "it proposes once for each root"
    committed(source, session, 7)
    await drafted(source)
    assert len(proposer.passes) == 1 and source.awaited(session) is not None


async def test_a_head_goes_deeper_in_one_call_only_where_a_level_gains_more_than_it_takes() -> None:
    proposer = Guesses(lambda text: [(ROOT, 7, 0.5)])
    source, sources = new_head(proposer)
    least = []
    for rate, level_s in ((100.0, 0.0), (100.0, 0.001), (100.0, 0.004), (400.0, 0.004)):
        sources.context.session_rate = rate
        source._drafting._level_budget._level_s = level_s or None
        session = new_session([1, 2])
        source.open(session, "eagle")
        source.step_held(session)
        await drafted(source)
        deeper = proposer.passes[-1][0].deeper
        assert deeper is not None
        least.append(math.exp(deeper.least_log_prob))
    assert [round(each, 3) for each in least] == [1.0, 0.1, 0.4, 1.6], "before one was timed: a single level"


async def test_a_head_that_finds_nothing_is_not_waited_for_any_longer() -> None:
    source, sources = new_head(Guesses(lambda text: []))
    woken = []
    sources.on_candidates(lambda: woken.append(1))
    session = new_session([1, 2])
    source.open(session, "eagle")
    source.step_held(session)
    await drafted(source)
    assert woken == [1] and source.awaited(session) is None
