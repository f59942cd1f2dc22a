"""What a client puts behind an output stands there as it was written: nothing comes before it or after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Encoder

from gateway.auth.tenant import OPEN
from gateway.text.tokenizer import Tokenizer
from gateway.text.worker import setup_of
from gateway.work.processes import ProcessSource
from gateway.work.tenant_work import TenantWork

BLANK, SIGNS = "▁", "abfo.\n"


def sentence_piece() -> Encoder:
    """Puts a blank before every text."""
    words = [BLANK, *SIGNS, BLANK + "f", "fo", BLANK + "fo"]
    merges = [(BLANK, "f"), ("f", "o"), (BLANK + "f", "o")]
    encoder = Encoder(models.BPE({word: index for index, word in enumerate(words)}, merges))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    encoder.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return encoder


def byte_level(space: bool) -> Encoder:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(models.BPE({word: index for index, word in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    encoder.decoder = decoders.ByteLevel()
    return encoder


FAMILIES = {
    "SentencePiece": sentence_piece,
    "bytes": lambda: byte_level(False),
    "bytes after a space": lambda: byte_level(True),
}


@cache
def tokenizer(family: str) -> Tokenizer:
    encoder = FAMILIES[family]()
    encoder.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    ends = [(word, encoder.token_to_id(word)) for word in ("<s>", "</s>")]
    encoder.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return Tokenizer(encoder, 1000)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(SIGNS + " ", min_size=1, max_size=12))
async def test_a_part_of_a_text_is_tokenized_without_special_tokens_or_spaces(family: str, text: str) -> None:
    told = tokenizer(family)
    part, detokenizer = await told.encode_middle(text, OPEN), told.detokenizer()
    before = await told.encode_middle("foo", OPEN)
    assert "".join(map(detokenizer.push, [*before, *part])) + detokenizer.flush() == "foo" + text
    whole = await told.encode(text, OPEN)
    assert [told.shown(token).text for token in (whole[0], whole[-1])] == ["<s>", "</s>"]
    assert all(told.shown(token).bytes for token in part)  # a special token has none


async def longest_gap(work: Awaitable[Any]) -> tuple[float, float]:
    """Seconds that `work` took, and the longest of them in which the event loop did nothing else."""
    began = last = time.monotonic()
    task, gap = asyncio.ensure_future(work), 0.0
    while not task.done():
        await asyncio.sleep(0)
        now = time.monotonic()
        last, gap = now, max(gap, now - last)
    await task
    return last - began, gap


async def test_a_long_text_leaves_the_event_loop_to_other_requests() -> None:
    encoder = byte_level(False)
    told, text = Tokenizer(encoder, 10_000_000), "foo bar, " * 10_000
    work = told.work = TenantWork(ProcessSource("gateway.text.worker", lambda: setup_of(told.encoding)), 2, 1 << 30)
    try:
        total, gap = await longest_gap(told.encode(text, OPEN))
        assert gap < total / 2
        tokens = await told.encode(text, OPEN)
        assert list(tokens) == encoder.encode(text).ids
        assert await told.decode(tokens, OPEN) == text
    finally:
        await work.close()
