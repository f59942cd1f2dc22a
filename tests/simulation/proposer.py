"""Guesses without a model: the target's own text, wrong here and there. For `ModelProposer`."""

from __future__ import annotations

import math
from collections.abc import Callable
from zlib import crc32

from drafter_svc.proposers import Answer, DraftRequest, ProposedNode
from drafter_svc.session import DraftSession
from tests.simulation.chained import VOCABULARY, follows

DEPTH = 3
"""Guesses below each node that is guessed on."""
WRONG = 4
"""One of so many positions is guessed wrong."""
LIKELY = math.log(0.7)


class Recall:
    draws = False

    def __init__(self, cost_s: float, sleep: Callable[[float], None]) -> None:
        self._cost_s = cost_s
        self._sleep = sleep

    def grow(self, turns: list[DraftRequest]) -> list[Answer]:
        self._sleep(self._cost_s)
        return [_guess(turn) for turn in turns]

    def close(self, session: DraftSession) -> None:
        """It holds nothing."""


def _guess(turn: DraftRequest) -> Answer:
    guesses: list[ProposedNode] = []
    for start, index in zip(turn.starts, turn.expand, strict=True):
        path = [*turn.pending, *turn.path(index)]
        token, parent = path[-1], start
        for place in range(turn.computed + len(path), turn.computed + len(path) + DEPTH):
            token = _recalled(turn.session.tokens[0], place, token)
            guesses.append(ProposedNode(parent, token, LIKELY))  # type: ignore[arg-type]
            parent = len(guesses) - 1  # type: ignore[assignment]
    return guesses


def _recalled(first: int, place: int, before: int) -> int:
    right = follows(first, place, before)
    return right if crc32(b"%d %d" % (first, place)) % WRONG else (right + 1) % VOCABULARY
