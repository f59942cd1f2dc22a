"""Propose the n-grams that the target guessed in its own passes (`slipstream.speculation.lookahead_window`)."""

from __future__ import annotations

from collections.abc import Hashable

from slipstream.proposers.base import OpenedProposer, ProposerContext, ProposerSettings, any_vocabulary
from slipstream.proposers.lookup import DOUBT, FoundNode, LookupProposer, confidence, doubt_at
from slipstream.speculation.lookahead_window import Gram, LookaheadSize, LookaheadWindow, NgramPool


class LookaheadText:
    """The `Text` of one pool: the n-grams that begin with the last token, as one tree. Those of the sequence's own text
    are in it too."""

    def __init__(self, size: LookaheadSize) -> None:
        self.pool = NgramPool(size.guesses)
        self.doubt = DOUBT
        """Doubt about its n-grams (`lookup.confidence`)."""
        self._size = size
        self._tail: list[int] = []

    def read(self, tokens: list[int]) -> None:
        size, known = self._size.gram, len(self._tail)
        text = [*self._tail, *tokens]
        for end in range(max(size, known + 1), len(text) + 1):
            self.pool.add(text[end - size], tuple(text[end - size + 1 : end]))
        self._tail = text[-(size - 1) :]

    def look_up(self, path: list[int], count: int) -> list[FoundNode]:
        grams = self.pool.after((path or self._tail)[-1])
        seen: dict[Gram, int] = {(): sum(hits for _, hits in grams)}
        for gram, hits in grams:
            for end in range(1, len(gram) + 1):
                seen[gram[:end]] = seen.get(gram[:end], 0) + hits
        nodes: list[FoundNode] = []
        numbers: dict[Gram, int] = {(): 0}
        for gram, _ in grams:
            for end in range(1, len(gram) + 1):
                branch = gram[:end]
                if branch not in numbers and branch[:-1] in numbers and len(nodes) < count:
                    numbers[branch] = len(nodes) + 1
                    sure = confidence(seen[branch], seen[branch[:-1]], end, self.doubt)
                    nodes.append(FoundNode(numbers[branch[:-1]], branch[-1], sure))
        return nodes

    def finish(self) -> None:
        """Nothing outlives a sequence."""


class LookaheadProposer(LookupProposer):
    """Proposes from the pools that windows fill."""

    def __init__(self, size: LookaheadSize) -> None:
        self._size = size
        self._texts: dict[Hashable, LookaheadText] = {}
        super().__init__(self._open_text)

    def open_window(self, handle: Hashable, tokens: list[int], ends: frozenset[int]) -> LookaheadWindow:
        """The window of the sequence that contexts with this handle are of."""
        text = self._texts[handle] = LookaheadText(self._size)
        return LookaheadWindow(self._size, tokens, ends, text.pool)

    def _open_text(self, context: ProposerContext) -> LookaheadText:
        text = self._texts.get(context.handle) or LookaheadText(self._size)
        text.doubt = doubt_at(context.sampling.temperature)
        return text

    def close_sequence(self, handle: Hashable) -> None:
        self._texts.pop(handle, None)
        super().close_sequence(handle)


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `lookahead`. Raises InvalidArgument for a window of no size."""
    proposer = LookaheadProposer(LookaheadSize.parse(settings.lookahead))
    return OpenedProposer(any_vocabulary("lookahead"), proposer, open_window=proposer.open_window)
