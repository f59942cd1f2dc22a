"""Words that an output does not have, as sequences of tokens: vLLM's `bad_words`.

As there, a word is forbidden as it is spelled at the beginning of a text and as it is spelled behind a space, each by
its last token, where those before it are the output's last. Unlike there, the second is never left out. Other tokens
may spell the same word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gateway.auth.tenant import Tenant
from gateway.text.tokenizer import Tokenizer
from slipstream.errors import InvalidArgument
from slipstream.speculation.sampling_params import SamplingParams

MOST_WORDS = 256
PIECE = 32
"""Spellings that are encoded at a time: 0.5 ms."""
MOST_BYTES = 8192
"""Bytes of all bad words of a request, at most: encoding them takes some milliseconds."""


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidArgument for more bytes than a request may have, and for a word that is empty or only space."""
    size = sum(len(word.encode()) for word in words)
    if size > MOST_BYTES:
        raise InvalidArgument(
            f"bad_words have {size} bytes in all; send at most {MOST_BYTES}.",
            reason="TEXT_TOO_LONG",
            field="bad_words",
            numbers={"bytes": size, "limit": MOST_BYTES},
        )
    if not all(word.strip() for word in words):
        raise InvalidArgument("A word of bad_words is empty; leave it out.", reason="NO_TOKENS", field="bad_words")


async def spelled(words: Sequence[str], tokenizer: Tokenizer, tenant: Tenant) -> list[tuple[int, ...]]:
    """The words' tokens, as each is spelled at the beginning of a text and behind a space."""
    spellings = [each for word in words for each in (word.lstrip(), f" {word.lstrip()}")]
    found: list[tuple[int, ...]] = []
    for number, each in enumerate(spellings):
        found.append(tuple(await tokenizer.encode_middle(each, tenant)))
        if number % PIECE == PIECE - 1:
            await asyncio.sleep(0)
    return found


def with_bad_words(sampling: SamplingParams, words: Sequence[tuple[int, ...]]) -> SamplingParams:
    """The parameters with the words' tokens. Raises InvalidArgument for more tokens than they may name."""
    return replace(sampling, bad_words_ids=tuple(dict.fromkeys([*sampling.bad_words_ids, *filter(None, words)])))
