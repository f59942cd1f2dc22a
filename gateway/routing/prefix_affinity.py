"""Which verifier has computed a text's beginning: there its KV may still be found, and the next turn starts sooner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

from gateway.store.session_store import pack_tokens

T = TypeVar("T")
STRIDE = 64
"""Tokens between two places that are remembered; shorter beginnings are computed as fast as they are looked for."""
MOST_PLACES = 64
"""Of one text."""
CAPACITY = 65_536


def beginnings(token_ids: Sequence[int], salt: str) -> list[bytes]:
    """A name for each beginning of STRIDE, 2 * STRIDE, ... tokens. Texts of different salts share none."""
    names: list[bytes] = []
    digest = blake2b(salt.encode(), digest_size=16)
    for start in range(0, min(len(token_ids), MOST_PLACES * STRIDE) - STRIDE + 1, STRIDE):
        digest.update(pack_tokens(token_ids[start : start + STRIDE]))
        names.append(digest.copy().digest())
    return names


class PrefixAffinity(Generic[T]):
    """Remembers the latest CAPACITY beginnings. A hint: what is remembered may be forgotten where it was computed."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._places: OrderedDict[bytes, T] = OrderedDict()

    def note(self, names: Sequence[bytes], place: T) -> None:
        """The text of these beginnings was computed there."""
        for name in names:
            self._places[name] = place
            self._places.move_to_end(name)
        while len(self._places) > self._capacity:
            self._places.popitem(last=False)

    def find(self, names: Sequence[bytes]) -> T | None:
        """Where the longest of these was computed last."""
        return next((self._places[name] for name in reversed(names) if name in self._places), None)
