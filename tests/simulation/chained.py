"""A target whose every token depends on the one before it: whoever edits a text changes all that follows."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from slipstream.engine.emulated.engine import EmulatedEngine, first_token, predicted_positions
from slipstream.engine.segment import Segment

VOCABULARY = 64


def follows(first: int, place: int, before: int, arithmetic: int = 0) -> int:
    """The token at a place of the text that begins with `first`, behind the token `before`."""
    return crc32(b"%d %d %d" % (first, place, before), arithmetic) % VOCABULARY


def continued(tokens: Sequence[int], length: int, arithmetic: int = 0) -> tuple[int, ...]:
    """The text that begins so, up to a length."""
    text = list(tokens)
    while len(text) < length:
        text.append(follows(text[0], len(text), text[-1], arithmetic))
    return tuple(text)


class ChainedEngine(EmulatedEngine):
    arithmetic = 0
    """Engines of another one write other texts."""

    def _next(self, segments: list[Segment]) -> np.ndarray:
        tokens: list[int] = []
        for segment in segments:
            befores = [segment.pending[-1], *segment.nodes]
            places = predicted_positions(segment)
            first, pairs = first_token(segment), zip(places, befores, strict=True)
            tokens += [follows(first, *pair, self.arithmetic) for pair in pairs]
        return np.array(tokens, np.int64)
