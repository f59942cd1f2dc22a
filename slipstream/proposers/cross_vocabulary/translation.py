"""Between the vocabularies of target and drafter: which tokens spell the same, and the target's text as draft tokens.

Everything goes over bytes. A target token is a piece: its bytes, or the one draft token that means the same where both
have a special token for something. What neither holds for (a chat mark that the drafter never saw) is nothing.
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
"""What a target token is in a drafter's text: bytes, or a draft token."""

CUT_FROM = 48
"""Bytes. Shorter chunks are never closed at a word."""
CUT_AT = 256
"""Bytes. Longer chunks are closed anywhere: what is encoded again for each new token is bounded by this."""
_WORD = re.compile(rb"(?<=[^\s]) (?=[A-Za-z\xc3-\xf4])")
"""Where text may be cut without a trace: no usual tokenizer has tokens across the space before a word."""
_CACHED = 1 << 14


class Translation:
    """`ends`: the end-of-text ids of target and drafter, which mean the same whatever they are called."""

    def __init__(self, target: Spelling, draft: Spelling, ends: tuple[Sequence[int], Sequence[int]] = ((), ())) -> None:
        self.target = target
        self.draft = draft
        twins = {index: draft.special[name] for name, index in target.special.items() if name in draft.special}
        if ends[1]:
            twins = dict.fromkeys(ends[0], ends[1][0]) | twins
        self.pieces: list[Piece] = [twins.get(index, word or b"") for index, word in enumerate(target.words)]
        self.first = self._first({theirs: mine for mine, theirs in reversed(twins.items())})
        """[draft tokens] int64: the first target token of what each spells; -1 for none."""
        self.begins = self._begins()
        """[draft tokens] bool: whether the drafter spells a longer target token with this one and others after it."""
        order = sorted((word, index) for index, word in enumerate(draft.words[: draft.size]) if word)
        self._order = [word for word, _ in order]
        self._order_ids = np.array([index for _, index in order], dtype=np.int64)
        self._targets = sorted({word for word in target.words if word})
        self.follow = lru_cache(_CACHED)(self._follow)
        """(what the last target token spells, what comes next) -> the next target token, or -1."""
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
        """-1 where the target would not have ended a token there if `rest` came next: then `rest` does not come.

        A text can tell that only of a last token that its own tokenizer makes of it.
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
    """Text that is not cut yet. `inside`: text stands before it."""

    data: bytes
    inside: bool


class DraftText:
    """A session's committed target tokens as draft tokens.

    `ids` is a function of the target tokens alone, however they came. The text is cut into chunks by a rule that looks
    only back, and each chunk is encoded by itself: more text changes the tokens of the last, open chunk only.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._tokens: list[int] = []
        self.closed: list[int] = list(translation.draft.opening)
        """Draft tokens that more text does not change."""
        self._open = Chunk(b"", False)

    def __len__(self) -> int:
        """Target tokens read."""
        return len(self._tokens)

    @property
    def ids(self) -> list[int]:
        return self.closed + self.tail()

    def read(self, start: int, tokens: Sequence[int]) -> bool:
        """The target tokens from index `start` on are these. False when tokens read before were others."""
        known = self._tokens[start:]
        same = len(known) <= len(tokens) and known == list(tokens[: len(known)])
        if not same:
            tokens = [*self._tokens[:start], *tokens]
            self._tokens, known = [], []
            self.closed, self._open = list(self._translation.draft.opening), Chunk(b"", False)
        fresh = tokens[len(known) :]
        self._tokens += fresh
        self._open = self._extend(self.closed, self._open, fresh)
        return same

    def tail(self, path: Sequence[int] = ()) -> list[int]:
        """The draft tokens after the closed ones, with the target tokens of `path` behind the committed ones."""
        tokens: list[int] = []
        last = self._extend(tokens, self._open, path)
        return tokens + list(self._translation.encode(last.data, last.inside))

    def spelled(self, path: Sequence[int] = ()) -> bytes:
        """What the last target token spells; nothing for one that is no text."""
        last = path[-1] if path else self._tokens[-1] if self._tokens else -1
        piece = self._translation.piece(last) if last >= 0 else b""
        return piece if isinstance(piece, bytes) else b""

    def _extend(self, closed: list[int], chunk: Chunk, tokens: Sequence[int]) -> Chunk:
        """Appends the tokens of chunks that end to `closed`; the chunk that is open then."""
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
    """Where the chunk that `data` begins with ends, if that can be told yet; whatever follows, the answer stays."""
    word = _WORD.search(data, CUT_FROM, CUT_AT + 2)
    if word is not None:
        return word.start()
    if len(data) < CUT_AT + 2:
        return None
    place = CUT_AT
    while data[place] & 0xC0 == 0x80 and place > CUT_AT - 4:  # not inside a character
        place -= 1
    return place
