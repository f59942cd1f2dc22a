"""Log-probabilities as `/v1/completions` has them: lists of tokens by name, and where each begins in the text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.api.openai.call import finite
from gateway.work.pieces import in_pieces
from slipstream.v1 import gateway_pb2

_utf8 = codecs.getincrementaldecoder("utf-8")
_CONTINUING = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
_MOST_REST = 3
"""Bytes of a character behind its first."""


async def completion_logprobs(logprobs: Sequence[gateway_pb2.Logprob], offset: int, text: str) -> dict[str, Any]:
    """`offset`: characters of the choice's text before these tokens. `text`: theirs."""
    return {
        "tokens": [_name(each.token) for each in logprobs],
        "token_logprobs": [finite(each.logprob) for each in logprobs],
        "top_logprobs": await in_pieces(_top, logprobs),
        "text_offset": _offsets([each.token.bytes for each in logprobs], offset, text),
    }


async def echoed_logprobs(
    first: gateway_pb2.TokenText,
    prompt: Sequence[gateway_pb2.Logprob],
    output: Sequence[gateway_pb2.Logprob],
    top: int,
    text: str,
) -> dict[str, Any]:
    """Those of the prompt and of the output behind it, with `top` likeliest tokens each. The prompt's first token has
    none: nothing comes before it. `text`: of both."""
    cut = await in_pieces(lambda each: _cut(each, top), prompt)
    made = await completion_logprobs([*cut, *output], 0, text)
    beginning = [first.bytes, *(each.token.bytes for each in (*prompt, *output))]
    return {
        "tokens": [_name(first), *made["tokens"]],
        "token_logprobs": [None, *made["token_logprobs"]],
        "top_logprobs": [None, *made["top_logprobs"]],
        "text_offset": _offsets(beginning, 0, text),
    }


async def prompt_logprobs(prompt: Sequence[gateway_pb2.Logprob], top: int) -> list[dict[str, Any] | None]:
    """As vLLM has them: for each of the prompt's tokens the likeliest ones by id and the token itself; null for the
    first. The rank of a token that is not among the likeliest is not known."""
    return [None, *await in_pieces(lambda each: _by_id(_cut(each, top)), prompt)]


def _by_id(each: gateway_pb2.Logprob) -> dict[str, Any]:
    found = {
        str(top.token.token_id): {
            "logprob": finite(top.logprob),
            "rank": rank,
            "decoded_token": top.token.text,
        }
        for rank, top in enumerate(each.top, 1)
    }
    own = {"logprob": finite(each.logprob), "rank": None, "decoded_token": each.token.text}
    return {str(each.token.token_id): own} | found


def _cut(each: gateway_pb2.Logprob, top: int) -> gateway_pb2.Logprob:
    return gateway_pb2.Logprob(token=each.token, logprob=each.logprob, top=each.top[:top])


def _top(each: gateway_pb2.Logprob) -> dict[str, float]:
    """The likeliest tokens by name, and the token itself, which may be none of them."""
    likeliest = {_name(top.token): finite(top.logprob) for top in reversed(each.top)}  # of one name the likelier
    return dict(reversed(likeliest.items())) | {_name(each.token): finite(each.logprob)}


def _name(token: gateway_pb2.TokenText) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI writes them: many such tokens look the same."""
    if token.bytes and "\ufffd" in token.text:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def _offsets(tokens: Sequence[bytes], offset: int, text: str) -> list[int]:
    """Characters of the choice's text before each token, for tokens that stand behind `offset` characters. A character
    counts once all its bytes are there. A space that the first token has, and `text`, the choice's first, has not, was
    stripped by the decoder."""
    whole, found, first = b"".join(tokens), list[int](), offset
    if not offset:
        offset = min(0, _spaces(text.encode()) - _spaces(whole))
    rest = len(whole) - len(whole.lstrip(_CONTINUING))  # of a character that tokens before these began
    rest = 0 if rest > _MOST_REST else rest
    decoder = _utf8("replace")  # as the text is decoded, where a model writes what is no UTF-8
    for token in tokens:
        found.append(max(first, offset))
        if 0 < rest <= len(token):
            offset += 1
        offset += len(decoder.decode(token[rest:]))
        rest = max(0, rest - len(token))
    return found


def _spaces(text: bytes) -> int:
    """Spaces at the beginning."""
    return len(text) - len(text.lstrip(b" "))
