"""Propose without a model: what followed the last tokens before, in the sequence itself or in another text.

A method is a `Text`, an index of one sequence's tokens; `LookupProposer` makes a `Proposer` of it. Every node to expand
is looked up with what stands before it, so a lookup needs no memory of what it proposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

from slipstream.errors import SlipstreamError
from slipstream.proposers.base import Proposal, ProposedNode, ProposerContext

NODES = 8
"""Most nodes proposed below one node in one step."""
DOUBT = 2.0
"""Imagined occurrences of a one-token match that went on otherwise, in greedy text. A longer match is doubted less in
proportion."""
WARMTH = 2.0
"""Times DOUBT that a match is doubted more in text drawn at temperature 1; it grows with the temperature's square."""


class FoundNode(NamedTuple):
    """One node of a lookup's answer. Parent 0 is the place that was looked up, parent n the n-th node of the list."""

    parent: int
    token: int
    probability: float
    """Given the parent; a path's is the product of its nodes'."""


class ReadableText(Protocol):
    """Anything made of one sequence's committed tokens."""

    def read(self, tokens: list[int]) -> None:
        """Appends `tokens`: the text of one opening of a session only grows."""
        ...


class Text(ReadableText, Protocol):
    """An index of one sequence's committed tokens."""

    def look_up(self, path: list[int], count: int) -> list[FoundNode]:
        """At most `count` nodes after the committed tokens and `path`, parents before children.

        `path` holds the candidate tokens from the root down to the node to propose on: this method's own ones of an
        earlier call among them. A bound on how far to propose is therefore a bound on `len(path)` too.
        """
        ...

    def finish(self) -> None:
        """Called once, when the sequence ends."""
        ...


AnyText = TypeVar("AnyText", bound=ReadableText)


class ContextReader(Generic[AnyText]):
    """Keeps a text up with the context of its sequence."""

    def __init__(self, text: AnyText) -> None:
        self.text = text
        self.length = 0
        """Committed tokens read."""

    def read_context(self, context: ProposerContext) -> AnyText:
        """The text after reading what is new in the context, as far as its budget allows."""
        start = self.length
        if context.length > start:
            self.length = min(context.length, start + context.max_read_tokens)
            self.text.read(context.tokens[start : self.length])
        return self.text


class LookupProposer:
    """Proposes from a `Text` for each sequence, made by `open_text` when the sequence is first seen."""

    def __init__(self, open_text: Callable[[ProposerContext], Text]) -> None:
        self._open_text = open_text
        self._readers: dict[Hashable, ContextReader[Text]] = {}

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        return [self._propose_one(context) for context in contexts]

    def close_sequence(self, handle: Hashable) -> None:
        reader = self._readers.pop(handle, None)
        if reader is not None:
            reader.text.finish()

    def _propose_one(self, context: ProposerContext) -> Proposal:
        reader = self._readers.get(context.handle)
        if reader is None:
            reader = self._readers[context.handle] = ContextReader(self._open_text(context))
        text = reader.read_context(context)
        nodes: list[ProposedNode] = []
        for place in context.expand if reader.length == context.length else ():
            before = len(context.node_tokens) + len(nodes) - 1
            for parent, token, probability in text.look_up(
                context.path(place), min(NODES, context.max_nodes - len(nodes))
            ):
                if token >= context.vocabulary_size:
                    break  # of another target's text
                nodes.append(ProposedNode(before + parent if parent else place, token, math.log(probability)))
        return Proposal(nodes, reader.length)


def doubt_at(temperature: float) -> float:
    """Doubt at a temperature: drawn text repeats itself less than the likeliest text. Fitted to SmolLM2's answers
    (`benchmarks.knobs`): with DOUBT alone claims were 1.15 times what was accepted at temperature 0, 2.0 times at 0.8
    and 2.9 times at 1; doubts of 4 and 6 make the latter two 1.03 and 1.07.
    """
    return DOUBT * (1.0 + WARMTH * temperature**2)


def confidence(hits: int, seen: int, length: int, doubt: float = DOUBT) -> float:
    """Probability of a token that followed `hits` of the `seen` earlier occurrences of the last `length` tokens.

    hits / (seen + doubt / length): few occurrences and short matches are weak evidence (the escape of PPM, Cleary and
    Witten 1984, made to depend on the length). Below 1, and over all tokens that followed one match the sum is below 1.

    DOUBT was fitted to held-out Python sources: one earlier occurrence of 1, 2, 3, 4 and 8 or more tokens was right
    in 28, 52, 59, 66 and 84 % of cases, where the formula gives 33, 50, 60, 67 and at least 80 %. Other text differs;
    measured acceptance corrects that.
    """
    return hits / evidence(seen, length, doubt)


def evidence(seen: int, length: int, doubt: float = DOUBT) -> float:
    """The divisor of the hits in `confidence`, the same for all tokens that followed one match."""
    return seen + doubt / length
