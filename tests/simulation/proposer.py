"""Guesses without a model: the target's own text, wrong here and there. For `ModelProposer`."""

from __future__ import annotations

import math
from collections.abc import Callable
from zlib import crc32

from drafter_svc.proposers import Answer, Guess, Turn
from drafter_svc.session import Session
from slipstream.engine.emulated import EmulatedEngine

DEPTH = 3
"""Guesses below each node that is guessed on."""
WRONG = 4
"""One of so many positions is guessed wrong."""
LIKELY = math.log(0.7)


class Recall:
    draws = False

    def __init__(self, target: EmulatedEngine, cost_s: float, sleep: Callable[[float], None]) -> None:
        self._target = target
        self._cost_s = cost_s
        self._texts: dict[int, list[int]] = {}
        self._sleep = sleep

    def grow(self, turns: list[Turn]) -> list[Answer]:
        self._sleep(self._cost_s)
        return [self._guess(turn) for turn in turns]

    def close(self, session: Session) -> None:
        """It holds nothing."""

    def _guess(self, turn: Turn) -> Answer:
        guesses: list[Guess] = []
        tokens = turn.session.tokens
        for start, index in zip(turn.starts, turn.expand, strict=True):
            place = turn.computed + len(turn.pending) + len(turn.path(index))
            parent: object = start
            for depth in range(DEPTH):
                token = self._token(tokens[0], place + depth)
                guesses.append(Guess(parent, token, LIKELY))  # type: ignore[arg-type]
                parent = len(guesses) - 1
        return guesses

    def _token(self, first: int, place: int) -> int:
        if first not in self._texts:
            self._texts[first] = self._target.text([first], 128)
        text = self._texts[first]
        right = text[place - 1] if place - 1 < len(text) else 0
        return right if crc32(b"%d %d" % (first, place)) % WRONG else (right + 1) % 64
