"""Guesses without a model: the target's own text, wrong here and there. For `ModelProposer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from zlib import crc32

from slipstream.errors import SlipstreamError
from slipstream.proposers.base import Proposal, ProposedNode, ProposerContext
from tests.simulation.chained import VOCABULARY, follows

DEPTH = 3
"""Guesses below each node that is guessed on."""
WRONG = 4
"""One of so many positions is guessed wrong."""
LIKELY = math.log(0.7)


class Recall:
    def __init__(self, cost_s: float, sleep: Callable[[float], None]) -> None:
        self._cost_s = cost_s
        self._sleep = sleep

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        self._sleep(self._cost_s)
        return [_guess(context) for context in contexts]

    def close_sequence(self, handle: Hashable) -> None:
        """It holds nothing."""


def _guess(context: ProposerContext) -> Proposal:
    guesses: list[ProposedNode] = []
    for node in context.expand:
        path = context.path(node)
        token, parent = [context.tokens[context.length - 1], *path][-1], node
        for place in range(context.length + len(path), context.length + len(path) + DEPTH):
            token = _recalled(context.tokens[0], place, token)
            guesses.append(ProposedNode(parent, token, LIKELY))
            parent = len(context.node_tokens) + len(guesses) - 1
    return Proposal(guesses, context.length)


def _recalled(first: int, place: int, before: int) -> int:
    right = follows(first, place, before)
    return right if crc32(b"%d %d" % (first, place)) % WRONG else (right + 1) % VOCABULARY
