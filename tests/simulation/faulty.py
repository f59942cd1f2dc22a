"""A target whose passes fail: some in a row, all of them for a while, or all that hold a poisoned text."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from slipstream.engine.emulated.engine import first_token
from slipstream.engine.engine import ModelOutput
from slipstream.engine.segment import Segment
from slipstream.errors import SlipstreamError
from tests.simulation.chained import ChainedEngine


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


ERRORS = (RuntimeError, MemoryError, Panic)


class FaultyEngine(ChainedEngine):
    def __init__(self, chance: random.Random, poisons: Mapping[int, int], *parts: Any) -> None:
        """`poisons`: by a text's first token, the length from which every pass with it fails."""
        super().__init__(*parts)
        self._kept, self.kv.keep = self.kv.keep, self._keep  # type: ignore[method-assign]
        self._chance = chance
        self._poisons = poisons
        self.failing = 0
        """Passes that are still to fail."""
        self.broken = False
        """Whether all fail."""
        self.refused: SlipstreamError | None = None
        """What was wrong with a step that it was given."""
        self._keeps: int | None = None
        """Sequences that are kept before the present pass fails; None: it does not."""

    def forward(self, segments: list[Segment], *asked: Any) -> ModelOutput:
        self._keeps = None
        if not (self.failing or self.broken or any(map(self._poisoned, segments))):
            return self._pass(segments, *asked)
        self.failing = max(0, self.failing - 1)
        stage = self._chance.randrange(4)
        if stage == 0:
            raise self._error()
        output = self._pass(segments, *asked)
        if stage == 1:
            raise self._error()
        self._keeps = self._chance.randrange(len(segments))
        return output

    def _pass(self, segments: list[Segment], *asked: Any) -> ModelOutput:
        try:
            return super().forward(segments, *asked)
        except SlipstreamError as error:
            self.refused = error
            raise

    def _keep(self, segment: Segment, path: list[int]) -> None:
        if self._keeps is not None:
            if not self._keeps:
                raise self._error()
            self._keeps -= 1
        self._kept(segment, path)

    def _poisoned(self, segment: Segment) -> bool:
        from_length = self._poisons.get(first_token(segment))
        return from_length is not None and segment.sequence.length + len(segment.pending) >= from_length

    def _error(self) -> BaseException:
        return self._chance.choice(ERRORS)("injected")
