"""Keys and values of a draft layer: of every token of a text with its hidden states, and of candidates below its end.

`PairReader` takes in what the target's passes bring of the texts.

Rows that were computed from the target's hidden states stay. Those of candidates were computed from the layer's own
states and go with the root that they hang below. A text whose beginning the target found in its prefix cache brings no
hidden states of it: the rows are copied from another text of the same salt that has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.engine import HiddenStates
from slipstream.proposers.base import HiddenRows, Proposal, ProposerContext
from slipstream.tokenizer.vocabulary import common_prefix

Path = tuple[int, ...]
"""Candidate tokens from below the root."""
FIRST_SLOTS = 64


@dataclass(slots=True, eq=False)
class PairCache:
    """Rows of one text: slot s is pair `start` + s, behind `length` slots come the candidates'."""

    salt: str
    start: int = 0
    """The first pair that has a row."""
    length: int = 0
    used: int = 0
    tokens: list[int] = field(default_factory=list)
    """The text's committed tokens; pair j needs tokens 0 .. j + 1."""
    slots: dict[Path, int] = field(default_factory=dict)
    """Slot of each candidate."""
    states: dict[Path, Tensor] = field(default_factory=dict)
    """[width] the layer's state of each candidate; of the last pair under ()."""
    _keys: Tensor | None = None
    _values: Tensor | None = None

    @property
    def end(self) -> int:
        """The first pair that has no row yet."""
        return self.start + self.length

    def append(self, keys: Tensor, values: Tensor) -> None:
        """[kv heads, T, size] rows behind the last one."""
        count = keys.shape[1]
        if self._keys is None or self._values is None or self.used + count > self._keys.shape[1]:
            room = max(FIRST_SLOTS, 2 * (self.used + count))
            self._keys, self._values = (
                _grown(old, new, self.used, room) for old, new in ((self._keys, keys), (self._values, values))
            )
        self._keys[:, self.used : self.used + count] = keys
        self._values[:, self.used : self.used + count] = values
        self.used += count

    def drop_candidates(self) -> None:
        self.used = self.length
        self.slots.clear()
        self.states.clear()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Keeps the rows, then [heads, T, size] for queries [heads, T, size] under mask bool [T, used]."""
        self.append(keys, values)
        assert self._keys is not None and self._values is not None
        seen = self._keys[None, :, : self.used], self._values[None, :, : self.used]
        return scaled_dot_product_attention(queries[None], *seen, attn_mask=mask, enable_gqa=True)[0]

    def text_mask(self, count: int, window: int) -> Tensor:
        """bool [count, slots]: what the next `count` pairs of the text see."""
        rows = torch.arange(self.length, self.length + count)[:, None]
        columns = torch.arange(self.length + count)[None]
        mask = columns <= rows
        return mask & (columns > rows - window) if window else mask

    def candidate_mask(self, paths: Sequence[Path], window: int) -> Tensor:
        """bool [paths, slots]: what candidates that are computed now see; those above them have slots already."""
        mask = torch.zeros(len(paths), self.used + len(paths), dtype=torch.bool)
        for row, path in enumerate(paths):
            first = max(0, self.length + len(path) - window) if window else 0
            mask[row, first : self.length] = True
            nearest = max(1, len(path) - window + 1) if window else 1
            mask[row, [self.slots[path[:depth]] for depth in range(nearest, len(path))]] = True
            mask[row, self.used + row] = True
        return mask

    def rows(self) -> tuple[Tensor, Tensor]:
        """[kv heads, slots, size] keys and values of the text."""
        assert self._keys is not None and self._values is not None
        return self._keys[:, : self.length], self._values[:, : self.length]

    def copy_from(self, other: PairCache, first: int) -> None:
        """Takes over the other text's rows of the pairs before `first`."""
        assert other._keys is not None and other._values is not None
        count = first - other.start
        self.start, self.length, self.used = other.start, 0, 0
        self.append(other._keys[:, :count], other._values[:, :count])
        self.length = count


def _grown(old: Tensor | None, new: Tensor, used: int, room: int) -> Tensor:
    grown = new.new_empty(new.shape[0], room, new.shape[2])
    if old is not None:
        grown[:, :used] = old[:, :used]
    return grown


class PairCaches:
    """The texts that are drafted for, and ended ones for as long as `most_pairs` leaves room."""

    def __init__(self, most_pairs: int) -> None:
        self._most_pairs = most_pairs
        self._open: dict[Hashable, PairCache] = {}
        self._ended: OrderedDict[int, PairCache] = OrderedDict()

    def find(self, handle: Hashable, salt: str, tokens: list[int], length: int) -> PairCache:
        """The text's cache, with its tokens brought up to date."""
        cache = self._open.setdefault(handle, PairCache(salt))
        cache.tokens += tokens[len(cache.tokens) : length]
        return cache

    def begin(self, cache: PairCache, first: int) -> None:
        """Starts a text whose hidden states begin at token `first`, with another text's rows of the pairs before it
        where there is one."""
        cache.start, cache.length = first, 0
        cache.drop_candidates()
        donors = (
            each
            for each in (*self._open.values(), *self._ended.values())
            if each is not cache
            and each.salt == cache.salt
            and each.start < first <= each.end
            and common_prefix(each.tokens, cache.tokens[: first + 1]) > first
        )
        donor = min(donors, key=lambda each: each.start, default=None)
        if donor is not None:
            cache.copy_from(donor, first)

    def has_room(self, count: int) -> bool:
        """Whether `count` more pairs fit; ended texts make room, the oldest first."""
        live = sum(each.length for each in self._open.values())
        ended = sum(each.length for each in self._ended.values())
        while self._ended and live + ended + count > self._most_pairs:
            ended -= self._ended.popitem(last=False)[1].length
        return live + count <= self._most_pairs

    def close(self, handle: Hashable) -> None:
        cache = self._open.pop(handle, None)
        if cache is not None and cache.length:
            cache.drop_candidates()
            self._ended[id(cache)] = cache
            self.has_room(0)


@dataclass(slots=True)
class NewPairs:
    """Pairs of one text that are read now, the first of them the first that its cache lacks."""

    cache: PairCache
    tokens: list[int]
    """The token behind each one's hidden states."""
    states: HiddenStates


class PairReader:
    """Keeps what each text has of hidden states and of rows."""

    def __init__(self, most_pairs: int) -> None:
        self.caches = PairCaches(most_pairs)
        self._of_handle: dict[Hashable, PairCache] = {}
        self._unread: dict[Hashable, list[HiddenRows]] = {}
        """Hidden states that were not read yet."""

    def cache(self, handle: Hashable) -> PairCache:
        return self._of_handle[handle]

    def read(self, contexts: list[ProposerContext]) -> tuple[list[Proposal], list[NewPairs]]:
        """Empty proposals with the length to which each text is read, and the pairs that have to get rows for that."""
        new: list[NewPairs] = []
        answers: list[Proposal] = []
        for context in contexts:
            cache = self.caches.find(context.handle, context.cache_salt, context.tokens, context.length)
            self._of_handle[context.handle] = cache
            rows = self._unread.setdefault(context.handle, [])
            for each in context.hidden:
                if rows and each.first > rows[-1].end:  # what is between them was dropped
                    rows.clear()
                rows.append(each)
            if rows and (not cache.length or rows[0].first > cache.end):
                self.caches.begin(cache, rows[0].first)
            end = min(context.length - 1, cache.end + context.max_read_tokens)
            states = _take(rows, cache.end, end)
            count = 0 if states is None else len(states.last)
            room = self.caches.has_room(count)
            if states is not None and not room:
                rows.insert(0, HiddenRows(cache.end, states))
            elif states is not None:
                cache.drop_candidates()
                new.append(NewPairs(cache, context.tokens[cache.end + 1 : cache.end + 1 + count], states))
            read = cache.end + 1 + (count if room else 0)
            partly = bool(rows) and read < context.length
            answers.append(Proposal([], read if partly else context.length, no_room=not room))
        return answers, new

    def close(self, handle: Hashable) -> None:
        self._of_handle.pop(handle, None)
        self._unread.pop(handle, None)
        self.caches.close(handle)


def _take(unread: list[HiddenRows], at: int, end: int) -> HiddenStates | None:
    """Takes the states of the tokens from `at` up to `end`, as far as they came."""
    taken: list[HiddenStates] = []
    while unread and unread[0].first < end:
        rows = unread.pop(0)
        if min(end, rows.end) > at:
            taken.append(rows.states.cut(max(0, at - rows.first), min(end, rows.end) - rows.first))
        if rows.end > end:
            unread.insert(0, HiddenRows(end, rows.states.cut(end - rows.first, len(rows.states.last))))
    return HiddenStates.join(taken) if taken else None
