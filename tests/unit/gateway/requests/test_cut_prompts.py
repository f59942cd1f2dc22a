"""A prompt is cut to a number of tokens as vLLM cuts it: at the beginning, and the special tokens around it stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.auth.tenant import OPEN
from gateway.requests.texts import RequestText, cut_tokens
from slipstream.errors import InvalidArgument

TEXT = list(range(10))
BOS, EOS = 100, 101


def of_text(around: tuple[int, int] = (0, 0)) -> RequestText:
    async def encode(most: int, tenant: Any) -> Sequence[int]:
        assert most == 0, "what is cut may be longer"
        return [BOS] * around[0] + TEXT + [EOS] * around[1]

    return RequestText(len(TEXT), encode, short=True, around=around)


@pytest.mark.parametrize(
    ("most", "at_the_end", "around", "expected"),
    [
        (4, False, (0, 0), [6, 7, 8, 9]),
        (4, True, (0, 0), [0, 1, 2, 3]),
        (4, False, (1, 0), [BOS, 7, 8, 9]),
        (4, True, (1, 0), [BOS, 0, 1, 2]),
        (4, False, (1, 1), [BOS, 8, 9, EOS]),
        (11, False, (1, 0), [BOS, *TEXT]),
        (50, False, (1, 1), [BOS, *TEXT, EOS]),
        (1, False, (1, 0), [9]),
        (0, False, (0, 0), []),
        (-1, False, (0, 0), [3, 4, 5, 6, 7, 8, 9]),
        (-1, False, (1, 0), [BOS, 4, 5, 6, 7, 8, 9]),
    ],
)
async def test_the_end_of_the_text_stays(
    most: int, at_the_end: bool, around: tuple[int, int], expected: list[int]
) -> None:
    may = 7 if most < 0 else 64
    cut = of_text(around).cut(most, at_the_end=at_the_end)
    assert list(await cut.tokens(may, OPEN)) == expected
    assert cut.least <= max(1, len(expected))


async def test_more_tokens_than_a_prompt_may_have_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 7 tokens") as caught:
        await of_text().cut(8, at_the_end=False).tokens(7, OPEN)
    assert caught.value.field == "truncate_prompt_tokens"


def test_room_for_special_tokens_alone_is_the_texts() -> None:
    assert cut_tokens([BOS, 1, 2, EOS], 2, (1, 1), at_the_end=False) == [2, EOS]


@pytest.mark.parametrize(("output", "expected"), [(3, 6), (1, 8), (4, 5), (100, 4), (None, 4)])
async def test_the_output_has_the_room_that_it_asks_for_up_to_half(output: int | None, expected: int) -> None:
    assert list(await of_text().fitted(output).tokens(8, OPEN)) == TEXT[-expected:]


async def test_a_text_that_leaves_the_output_its_room_is_whole() -> None:
    assert list(await of_text((1, 0)).fitted(5).tokens(16, OPEN)) == [BOS, *TEXT]
