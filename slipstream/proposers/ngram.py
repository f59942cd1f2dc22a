"""Prompt lookup: propose what followed the last few tokens when they last occurred in the sequence (Saxena 2023).

https://github.com/apoorvumang/prompt-lookup-decoding: text that is copied, edited or quoted repeats its own n-grams.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from slipstream.errors import InvalidArgument, OutOfRange
from slipstream.proposers.base import OpenedProposer, ProposerSettings, any_vocabulary
from slipstream.proposers.lookup import FoundNode, LookupProposer, confidence

_TOKEN_BITS = 32
_ROOT = 0


class NgramIndex:
    """Every n-gram of one sequence with up to `longest` + 1 tokens, as a trie; the last level counts continuations.

    Constant work for each appended and each truncated token. Truncation is exact: every token keeps what it overwrote,
    and nodes are numbered in the order of the tokens, so that it only shortens arrays.

    Memory: about 300 bytes for each token of source code, 550 if no n-gram ever repeats.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise InvalidArgument(f"n-grams of {shortest} to {longest} tokens do not exist.")
        self.longest, self.shortest = longest, shortest
        self._depth = longest + 1
        self._tokens = array("i")
        self._children: dict[int, int] = {}  # (parent node, token) packed into one integer -> node
        self._count = array("i", [0])  # each node's occurrences
        self._latest = array("i", [0])  # index just after each node's last occurrence
        # For each token `_depth` entries, for the grams of 1, 2, ... tokens that end in it:
        self._nodes = array("i")  # the node; the root where the text is too short
        self._before = array("i")  # what the token overwrote in `_latest`

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            start = len(self._nodes) - self._depth  # of the previous token's grams; below 0 for the first one
            self._tokens.append(token)
            parent = _ROOT
            for size in range(self._depth):
                known = size == 0 or parent != _ROOT
                self._enter(parent << _TOKEN_BITS | token if known else None)
                parent = self._nodes[start + size] if start >= 0 else _ROOT

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens. Raises OutOfRange beyond the end."""
        if not 0 <= length <= len(self):
            raise OutOfRange(f"length {length} is not between 0 and {len(self)}.")
        while len(self._tokens) > length:
            token = self._tokens.pop()
            start = len(self._nodes) - 2 * self._depth
            for size in reversed(range(self._depth)):
                parent = self._nodes[start + size - 1] if size and start >= 0 else _ROOT
                self._leave(parent << _TOKEN_BITS | token)

    def propose(self, path: Sequence[int], count: int) -> list[tuple[int, float]]:
        """A chain of at most `count` (token, probability) after the sequence's tokens and then `path`.

        It copies what followed the latest earlier occurrence of the longest known n-gram, and goes on into what it
        copied itself where that occurrence reaches the end, as in a loop. Only appended tokens are evidence, never
        `path`. A probability is the `confidence` given the tokens before it; the chain ends where it is 0.
        """
        beyond = list(path)
        source = self._source(self._tail(beyond))
        chain: list[tuple[int, float]] = []
        while source and len(chain) < count:
            token = self._tokens[source] if source < len(self) else beyond[source - len(self)]
            probability = self._probability(self._tail(beyond), token)
            if not probability:
                break
            chain.append((token, probability))
            beyond.append(token)
            source += 1
        return chain

    def _enter(self, key: int | None) -> None:
        """Adds a gram that ends in the last token; None for one that would begin before the text."""
        if key is None:
            self._nodes.append(_ROOT)
            self._before.append(0)
            return
        node = self._children.get(key, _ROOT)
        if node == _ROOT:
            node = self._children[key] = len(self._count)
            self._count.append(0)
            self._latest.append(0)
        self._nodes.append(node)
        self._before.append(self._latest[node])
        self._count[node] += 1
        self._latest[node] = len(self._tokens)

    def _leave(self, key: int) -> None:
        """Undoes the last `_enter`."""
        node, before = self._nodes.pop(), self._before.pop()
        if node == _ROOT:
            return
        self._count[node] -= 1
        self._latest[node] = before
        if not self._count[node]:
            del self._children[key]
            self._count.pop()
            self._latest.pop()

    def _tail(self, beyond: list[int]) -> list[int]:
        """The last `longest` tokens of the text and the path beyond it."""
        return [*self._tokens[-self.longest :], *beyond[-self.longest :]][-self.longest :]

    def _source(self, tail: list[int]) -> int:
        """Index after the latest occurrence of the longest n-gram that `tail` ends in; 0 if nothing matches."""
        for size in range(min(self.longest, len(tail)), self.shortest - 1, -1):
            node = self._node(tail[-size:])
            if self._followed(node, size):
                at_end = self._latest[node] == len(self)
                return self._before[len(self._before) - self._depth + size - 1] if at_end else self._latest[node]
        return 0

    def _probability(self, tail: list[int], token: int) -> float:
        """Probability of `token` after the longest n-gram that `tail` ends in and that something has followed."""
        for size in range(min(self.longest, len(tail)), self.shortest - 1, -1):
            node = self._node(tail[-size:])
            seen = self._followed(node, size)
            if seen:
                longer = self._children.get(node << _TOKEN_BITS | token, _ROOT)
                return confidence(self._count[longer], seen, size)
        return 0.0

    def _followed(self, node: int, size: int) -> int:
        """Occurrences of a gram of `size` tokens that a token follows; only the text's end has none after it."""
        return self._count[node] - (self._latest[node] == len(self)) if node else 0

    def _node(self, gram: list[int]) -> int:
        node = _ROOT
        for token in gram:
            node = self._children.get(node << _TOKEN_BITS | token, _ROOT)
            if node == _ROOT:
                break
        return node


class NgramText:
    """The `Text` of prompt lookup: a chain, copied from after the latest earlier occurrence."""

    def __init__(self) -> None:
        self._index = NgramIndex()

    def read(self, start: int, tokens: list[int]) -> None:
        self._index.truncate(start)
        self._index.append(tokens)

    def look_up(self, path: list[int], count: int) -> list[FoundNode]:
        chain = self._index.propose(path, count)
        return [FoundNode(number, token, probability) for number, (token, probability) in enumerate(chain)]

    def finish(self) -> None:
        """Nothing outlives a sequence."""


def open_proposer(settings: ProposerSettings) -> OpenedProposer:
    """The method `ngram`; it has no settings."""
    return OpenedProposer(any_vocabulary("ngram"), LookupProposer(lambda context: NgramText()))
