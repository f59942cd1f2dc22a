"""Encoding of text that continues another one, with tokenizers that treat all input as the beginning of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]
"""Encodes without special tokens. May raise where the tokenizer has no token for a character."""
_ANCHORS = ("\n", "0", ".", "a")
_PROBES = ("b", " b", "\nb", "(b")


class MidTextEncoder:
    """Encodes behind an anchor, whose tokens are removed again: the tokenizer puts its space before the anchor."""

    def __init__(self, encode: Encode, joined: Callable[[Sequence[int]], bytes]) -> None:
        """`joined` returns the bytes of tokens that follow others."""
        self._encode = encode
        self._joined = joined
        self.prepends = joined(self._probed("b")) == b" b"
        """Whether the tokenizer puts a space before a text."""
        self._anchor = self._find_anchor() if self.prepends else None

    def encode(self, text: str) -> list[int]:
        if self._anchor is not None:
            anchor, tokens = self._anchor
            found = self._encode(anchor + text)
            if found[: len(tokens)] == tokens:
                return found[len(tokens) :]
        return self._encode(text)

    def _probed(self, text: str) -> list[int]:
        try:
            return self._encode(text)
        except Exception:  # tokenizers raises bare Exception
            return []

    def _find_anchor(self) -> tuple[str, list[int]] | None:
        def intact(anchor: str) -> int:
            tokens = self._probed(anchor)
            found = [(self._probed(anchor + probe), probe) for probe in _PROBES]
            size = len(tokens)
            return sum(ids[:size] == tokens and self._joined(ids[size:]) == text.encode() for ids, text in found)

        best = max(_ANCHORS, key=intact)
        return (best, self._probed(best)) if intact(best) else None
