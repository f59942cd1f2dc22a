"""How many nodes a draft model expands in a pass follows from how long passes take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.engine.factory import open_engine
from slipstream.errors import ResourceExhausted, SlipstreamError
from slipstream.proposers.base import Proposal, ProposerContext
from slipstream.proposers.draft_model import ModelProposer
from slipstream.proposers.expansion import SIZES, measured_expansion


class Clocked:
    """A proposer on a clock of its own: a pass takes `cost` of its nodes, and every third one is disturbed."""

    def __init__(self, cost: Callable[[int], float], answer: Proposal | SlipstreamError) -> None:
        self.now = 0.0
        self.passes: list[int] = []
        self.closed = 0
        self._cost, self._answer = cost, answer

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        (context,) = contexts
        self.passes.append(len(context.expand))
        self.now += self._cost(len(context.expand)) + 5.0 * (len(self.passes) % 3 == 0 and len(self.passes) < 6)
        return [self._answer]

    def close_sequence(self, handle: object) -> None:
        self.closed += 1

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (lambda nodes: 2.0, 16),
        (lambda nodes: 2.0 + 0.02 * nodes, 16),  # 2.08, 2.16, 2.32
        (lambda nodes: 2.0 + 0.05 * nodes, 8),  # 2.2, 2.4, 2.8
        (lambda nodes: 0.5 * nodes, 4),
        (lambda nodes: 9.0 if nodes == 8 else 2.0, 16),
    ],
)
def test_as_many_nodes_as_take_a_fifth_longer_at_most(cost: Callable[[int], float], expected: int) -> None:
    proposer = Clocked(cost, Proposal([], 3))
    assert measured_expansion(proposer, proposer.clock) == expected
    assert set(proposer.passes) == set(SIZES) and proposer.closed == 1


@pytest.mark.parametrize("answer", [ResourceExhausted("full", reason="KV_EXHAUSTED"), Proposal([], 0, no_room=True)])
def test_without_room_to_measure_few_nodes_are_expanded(answer: Proposal | SlipstreamError) -> None:
    proposer = Clocked(lambda nodes: 2.0, answer)
    assert (measured_expansion(proposer, proposer.clock), proposer.closed) == (4, 1)


def test_measuring_leaves_nothing_in_the_cache_of_a_model() -> None:
    engine = open_engine("emulated:")
    free = engine.kv.blocks_free
    assert measured_expansion(ModelProposer(engine, width=4, proposal_tokens=32)) in SIZES
    assert engine.kv.blocks_free == free
