"""Translation between the vocabularies of target and drafter, token by token over bytes.

A target token is a piece: its bytes, or its twin, the draft token that means the same where both vocabularies have such
a special token. A special token without a twin is no piece of the draft text.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.proposers.cross_vocabulary.spelling import Spelling

Ids = npt.NDArray[np.int64]
Piece = bytes | int
"""A target token in a drafter's text: bytes, or a draft token."""

CUT_FROM = 48
"""Bytes of the shortest chunk that is closed at a word."""
CUT_AT = 256
"""Bytes of the longest chunk: it is encoded again for each new token."""
_WORD = re.compile(rb"(?<=[^\s]) (?=[A-Za-z\xc3-\xf4])")
"""Places at which text may be cut: no usual tokenizer has tokens across the space before a word."""
_CACHED = 1 << 14


class Translation:
    """`ends`: the end-of-text ids of target and drafter, which are twins."""

    def __init__(self, target: Spelling, draft: Spelling, ends: tuple[Sequence[int], Sequence[int]] = ((), ())) -> None:
        self.target = target
        self.draft = draft
        twins = {index: draft.special[name] for name, index in target.special.items() if name in draft.special}
        if ends[1]:
            twins = dict.fromkeys(ends[0], ends[1][0]) | twins
        self.pieces: list[Piece] = [twins.get(index, word or b"") for index, word in enumerate(target.words)]
        self.first = self._first({theirs: mine for mine, theirs in reversed(twins.items())})
        """[draft tokens] int64: first target token of the bytes that each spells; -1 for none."""
        self.begins = self._begins()
        """[draft tokens] bool: true for the first of several draft tokens that spell one target token."""
        order = sorted((word, index) for index, word in enumerate(draft.words[: draft.size]) if word)
        self._order = [word for word, _ in order]
        self._order_ids = np.array([index for _, index in order], dtype=np.int64)
        self._targets = sorted({word for word in target.words if word})
        self.follow = lru_cache(_CACHED)(self._follow)
        """(bytes of the last target token, the bytes after it) -> the next target token, or -1."""
        self._alone = lru_cache(_CACHED)(self._find_alone)
        self.encode = lru_cache(_CACHED)(self._encode)
        """(bytes, inside) -> draft tokens."""

    def piece(self, token: int) -> Piece:
        return self.pieces[token] if token < len(self.pieces) else b""

    def extensions(self, start: bytes) -> Ids:
        """The draft tokens that spell `start` and more."""
        after = start.rstrip(b"\xff")
        low = bisect_right(self._order, start)
        high = bisect_left(self._order, after[:-1] + bytes([after[-1] + 1])) if after else len(self._order)
        return self._order_ids[low:high]

    def grows(self, data: bytes) -> bool:
        """Whether a target token spells `data` and more."""
        place = bisect_right(self._targets, data)
        return place < len(self._targets) and self._targets[place].startswith(data)

    def _follow(self, last: bytes, rest: bytes) -> int:
        """-1 where the target, before `rest`, would not have ended a token after `last`: then `rest` does not follow.

        This is known only of a last token that the target's tokenizer makes of the same bytes.
        """
        alone = self._alone(last)
        if alone < 0:
            return self._spelled(self.target.encode(rest), rest)
        tokens = self.target.encode(last + rest)
        return self._spelled(tokens[1:], rest) if tokens[:1] == [alone] else -1

    def _find_alone(self, word: bytes) -> int:
        """The target token that its tokenizer makes of the word, if it makes just one; else -1."""
        tokens = self.target.encode(word) if word else []
        return tokens[0] if len(tokens) == 1 else -1

    def _spelled(self, tokens: list[int], data: bytes) -> int:
        """The first of the tokens if it really spells the beginning of `data`; no unknown token does."""
        word = self.target.word(tokens[0]) if tokens else None
        return tokens[0] if word and data.startswith(word) else -1

    def _encode(self, data: bytes, inside: bool) -> tuple[int, ...]:
        if not inside and self.target.prepends:  # the space that its tokenizer put there is not the text's
            data = data.removeprefix(b" ")
        return tuple(self.draft.encode(data, inside))

    def _first(self, twins: dict[int, int]) -> Ids:
        first = np.full(self.draft.size, -1, dtype=np.int64)
        for index, word in enumerate(self.draft.words[: self.draft.size]):
            if index in twins:
                first[index] = twins[index]
            elif word:
                first[index] = self._spelled(self.target.encode(word), word)
        return first

    def _begins(self) -> npt.NDArray[np.bool_]:
        begins = np.zeros(self.draft.size, dtype=np.bool_)
        for piece in self.pieces:
            tokens = self.draft.encode(piece) if isinstance(piece, bytes) else []
            if len(tokens) > 1:
                begins[tokens[0]] = True
        return begins


class Chunk(NamedTuple):
    """Text that is not cut yet."""

    data: bytes
    inside: bool
    """Text stands before it."""


class DraftText:
    """A sequence's committed target tokens as draft tokens.

    `ids` is a function of the target tokens alone, however they arrived. The text is cut into chunks by a rule that
    looks only back, and each chunk is encoded by itself: more text changes the tokens of the last, open chunk only.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._count = 0
        self._last = -1
        self.closed: list[int] = list(translation.draft.opening)
        """Draft tokens that more text does not change."""
        self._open = Chunk(b"", False)

    def __len__(self) -> int:
        """Target tokens read."""
        return self._count

    @property
    def ids(self) -> list[int]:
        return self.closed + self.tail()

    def read(self, tokens: list[int]) -> None:
        """Appends target tokens."""
        self._count += len(tokens)
        self._last = tokens[-1] if tokens else self._last
        self._open = self._extend(self.closed, self._open, tokens)

    def tail(self, path: Sequence[int] = ()) -> list[int]:
        """The draft tokens after the closed ones, with the target tokens of `path` behind the committed ones."""
        tokens: list[int] = []
        last = self._extend(tokens, self._open, path)
        return tokens + list(self._translation.encode(last.data, last.inside))

    def spelled(self, path: Sequence[int] = ()) -> bytes:
        """Bytes of the last target token; none for a token that is no text."""
        last = path[-1] if path else self._last
        piece = self._translation.piece(last) if last >= 0 else b""
        return piece if isinstance(piece, bytes) else b""

    def _extend(self, closed: list[int], chunk: Chunk, tokens: Sequence[int]) -> Chunk:
        """Appends the tokens of chunks that end to `closed`; returns the open chunk."""
        translation = self._translation
        data, inside = chunk.data, chunk.inside
        for token in tokens:
            piece = translation.piece(token)
            if isinstance(piece, int):
                closed += translation.encode(data, inside)
                inside = inside or bool(data)
                if inside or piece not in translation.draft.opening:  # the beginning is marked already
                    closed.append(piece)
                data = b""
                continue
            data += piece
            while (cut := _cut(data)) is not None:
                closed += translation.encode(data[:cut], inside)
                data, inside = data[cut:], True
        return Chunk(data, inside)


def _cut(data: bytes) -> int | None:
    """End of the chunk that `data` begins with; None while more bytes could move it."""
    word = _WORD.search(data, CUT_FROM, CUT_AT + 2)
    if word is not None:
        return word.start()
    if len(data) < CUT_AT + 2:
        return None
    place = CUT_AT
    while data[place] & 0xC0 == 0x80 and place > CUT_AT - 4:  # not inside a character
        place -= 1
    return place
