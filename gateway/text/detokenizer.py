"""Token ids to text as they come: the pieces joined are exactly what decoding all ids at once gives, behind a prompt
what decoding both gives behind the prompt's text.

How much text is final depends on the tokenizer's decoder, so there is one detokenizer for each family:

- `ByteLevel` (GPT-2, Llama 3, Qwen): a token is a run of bytes, text is final at the end of a character.
- per token (SentencePiece with byte fallback, WordPiece, no decoder): a token's text depends on the token alone, but a
  run of single-byte tokens is decoded as a whole, hence final only when it ends.
- anything else: text is final when the session ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from tokenizers import Tokenizer

from slipstream.tokenizer.codec import byte_level, byte_token, chain, plain_token
from slipstream.v1 import gateway_pb2

_ENDING = 16
"""Tokens that hold what a template writes last, such as `<think>` and an end of line."""
_PER_TOKEN = {"Replace", "ByteFallback", "Metaspace", "WordPiece"}
MOST_AT_AN_END = 16
"""Tokens of a prompt's beginning, or end, that decide how a decoder goes on behind it, at most."""


class Detokenizer(Protocol):
    def push(self, token: int) -> str:
        """Add a token; returns the text that became final."""

    def flush(self) -> str:
        """The rest of the text, once no more tokens can follow."""


class TokenDecoder:
    """Decodes tokens for all sessions of one tokenizer. `detokenizer` makes the state of one session."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {each.content: token for token, each in added.items()}
        self._hidden = {token for token, each in added.items() if each.special}
        self._special = {tokenizer.id_to_token(token) for token in self._hidden}
        kinds = chain(tokenizer)
        self._byte_level = [kind["type"] for kind in kinds] == ["ByteLevel"]
        self._anchor = self._find_anchor() if _is_per_token(kinds) else None
        self._texts: dict[int, gateway_pb2.TokenText] = {}

    def detokenizer(
        self,
        before: Sequence[int] = (),
        shown: Collection[int] = (),
        left_out: Collection[int] = (),
        *,
        as_text: bool = False,
    ) -> Detokenizer:
        """`before`: tokens that the text goes on from. Without any a decoder may strip a space that the first word has
        inside a text. `shown`: special tokens that are written into the text. `as_text`: as parts of the text, which is
        what decoding it with them gives; else as marks, behind which a text begins. `left_out`: tokens that end the
        text and are no part of it."""
        plain = self._detokenizer(before)
        written = {token: self.written(token) for token in self._hidden.intersection(shown)}
        written |= dict.fromkeys(set(left_out) - self._hidden, "")
        return _Showing(plain, written, self._inside if as_text else None) if written else plain

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens without text."""
        return frozenset(self._hidden)

    def written(self, token: int) -> str:
        """A special token as it is written."""
        return str(self._tokenizer.id_to_token(token))

    def _inside(self) -> Detokenizer:
        """A detokenizer for what stands within a text."""
        return self._detokenizer(() if self._anchor is None else (self._anchor[0],))

    def control_token(self, mark: str) -> int | None:
        """The token that is written so and that grammars take for no text: a special one, or an added one in pointed
        brackets (llguidance's rule). None where there is none."""
        token = self._added.get(mark)
        return token if token in self._hidden or (mark[:1] == "<" and mark[-1:] == ">") else None

    def specials(self, marks: Sequence[str]) -> list[int]:
        """Those of the marks' tokens that have no text."""
        return [token for mark in marks if (token := self._added.get(mark)) in self._hidden and token is not None]

    def ending(self, tokens: Sequence[int]) -> str:
        """The text of the last tokens of a prompt, special ones included."""
        text: str = self._tokenizer.decode_batch([list(tokens[-_ENDING:])], skip_special_tokens=False)[0]
        return text

    def _detokenizer(self, before: Sequence[int]) -> Detokenizer:
        if self._byte_level:
            return _ByteLevel(self)
        if self._anchor is not None:
            return _PerToken(self, before)
        return _Whole(self, before)

    def leading(self, tokens: Iterable[int]) -> list[int]:
        """The first few tokens that are of a text."""
        texts = (token for token in tokens if token not in self._hidden and self.shown(token) is not None)
        return list(islice(texts, MOST_AT_AN_END))

    def trailing(self, tokens: Sequence[int]) -> list[int]:
        """The last few tokens that are of a text."""
        return self.leading(reversed(tokens))[::-1]

    def shown(self, token: int) -> str | None:
        """The vocabulary entry of a token; None for one without text."""
        word: str | None = self._tokenizer.id_to_token(token)
        return None if word is None or word in self._special else word

    def whole(self, tokens: Sequence[int]) -> str:
        # A batch of one: unlike `decode`, it leaves Python's lock to other threads.
        text: str = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=True)[0]
        return text

    def text_of(self, token: int) -> gateway_pb2.TokenText:
        """The text and bytes of a single token. The bytes of an output's tokens, joined, are those of its text, except
        for what a decoder strips at the beginning of the text."""
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = self._text_of(token)
        return known

    def _text_of(self, token: int) -> gateway_pb2.TokenText:
        word = self.shown(token)
        if word is None:
            return gateway_pb2.TokenText(token_id=token, text=self._tokenizer.id_to_token(token) or "")
        raw = byte_level(word) if self._byte_level else byte_token(word)
        if raw is None:
            raw = self.after_others([token]).encode()
        return gateway_pb2.TokenText(token_id=token, text=raw.decode("utf-8", "replace"), bytes=raw)

    def after_others(self, tokens: Sequence[int]) -> str:
        """The text of tokens that do not come first."""
        if self._anchor is None:
            return self.whole(tokens)
        anchor, text = self._anchor
        return self.whole([anchor, *tokens])[len(text) :]

    def _find_anchor(self) -> tuple[int, str] | None:
        shown = ((token, self.shown(token)) for token in range(self._tokenizer.get_vocab_size(with_added_tokens=True)))
        return plain_token((token for token, word in shown if word is not None and not byte_token(word)), self.whole)


class _Showing:
    """Writes some tokens as it is given them, each of which ends what came before it: special ones into the text, and
    those that are left out as nothing."""

    def __init__(
        self, plain: Detokenizer, written: Mapping[int, str], inside: Callable[[], Detokenizer] | None
    ) -> None:
        """`inside`: makes the detokenizer of what follows them; None: it begins as it would without them."""
        self._plain = plain
        self._written = written
        self._inside = inside

    def push(self, token: int) -> str:
        text = self._written.get(token)
        if text is None:
            return self._plain.push(token)
        text = self._plain.flush() + text
        if self._inside is not None:
            self._plain = self._inside()
        return text

    def flush(self) -> str:
        return self._plain.flush()


class _ByteLevel:
    def __init__(self, decoding: TokenDecoder) -> None:
        self._decoding = decoding
        # Both this and Rust's lossy decoding put one mark for each maximal beginning of a character (Unicode 3.9).
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        word = self._decoding.shown(token)
        return "" if word is None else self._utf8.decode(byte_level(word))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _PerToken:
    def __init__(self, decoding: TokenDecoder, before: Sequence[int]) -> None:
        self._decoding = decoding
        lead = decoding.leading(before)
        self._begun = bool(lead) and bool(decoding.whole(lead))
        """Whether there is any text: until then a decoder may still strip what it takes for a leading space."""
        self._pending = [] if self._begun else lead

    def push(self, token: int) -> str:
        word = self._decoding.shown(token)
        if word is None:
            return ""
        if byte_token(word):
            self._pending.append(token)
            return ""
        if not self._begun:
            self._pending.append(token)
            return self.flush()
        return self.flush() + self._decoding.after_others([token])

    def flush(self) -> str:
        if not self._pending:
            return ""
        text = self._decoding.after_others(self._pending) if self._begun else self._decoding.whole(self._pending)
        self._begun = self._begun or bool(text)
        self._pending = [] if self._begun else self._pending
        return text


class _Whole:
    def __init__(self, decoding: TokenDecoder, before: Sequence[int]) -> None:
        self._decoding = decoding
        self._before = decoding.trailing(before)
        self._tokens: list[int] = []

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return ""

    def flush(self) -> str:
        tokens, self._tokens = self._tokens, []
        if not tokens:
            return ""
        text, before = self._decoding.whole([*self._before, *tokens]), self._decoding.whole(self._before)
        self._before = self._decoding.trailing([*self._before, *tokens])  # what a text goes on from
        return text[len(before) :] if text.startswith(before) else self._decoding.whole(tokens)


def _is_per_token(kinds: list[dict[str, Any]]) -> bool:
    """Token by token up to a Fuse; after it nothing but stripping at the very beginning."""
    names = [kind["type"] for kind in kinds]
    fused = names.index("Fuse") if "Fuse" in names else len(names)
    before, after = kinds[:fused], kinds[fused + 1 :]
    return all(kind["type"] in _PER_TOKEN for kind in before) and all(
        kind["type"] == "Strip" and kind["stop"] == 0 for kind in after
    )
