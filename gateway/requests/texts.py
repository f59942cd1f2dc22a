"""The texts of one request, encoded when all cheaper checks have passed, and once for all of its choices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.auth.tenant import Tenant
from gateway.text.chat_messages import Message, chat_goes_on, goes_on
from gateway.text.large_message import LargeRequest
from gateway.text.tokenizer import Tokenizer
from gateway.work.once import Once
from gateway.work.pieces import is_short
from slipstream.errors import NUMBER_OUT_OF_RANGE, InvalidArgument, Unavailable
from slipstream.v1 import gateway_pb2

Encode = Callable[[int, Tenant], Awaitable[Sequence[int]]]
"""Token ids, made as the tenant's work; may refuse a text of more than so many."""


Keep = Callable[[], Awaitable[bytes]]
"""Makes what the gateway keeps with a session."""

FITTED = 0.5
"""Share of what a prompt may have that `truncation: auto` keeps of a conversation at least."""


class RequestText:
    """A prompt or a prediction."""

    def __init__(
        self,
        least: int,
        encode: Encode,
        *,
        short: bool = False,
        goes_on: bool = True,
        ends: Sequence[str] = (),
        around: tuple[int, int] = (0, 0),
    ) -> None:
        """`short`: encoding it waits for nothing. `around`: tokens that the tokenizer puts before and behind it."""
        self.least = least
        """Tokens that it has at least."""
        self.goes_on = goes_on
        """Whether what is written behind it goes on from it; else a message begins there."""
        self.ends = ends
        """Texts that end what is written behind it."""
        self._encode = encode
        self._around = around
        self._short = short
        self._encoded: Once[Sequence[int]] | None = None
        self._kept: tuple[int, ...] | None = None

    def cut(self, most: int, *, at_the_end: bool) -> RequestText:
        """This text, with `most` tokens: the last ones, or the first. -1: as many as it may have. Those that the
        tokenizer puts around a text stay."""

        def kept(may: int) -> int:
            if most > may:
                raise InvalidArgument(
                    f"truncate_prompt_tokens is {most}, and a prompt has at most {may} tokens here; send less.",
                    reason=NUMBER_OUT_OF_RANGE,
                    field="truncate_prompt_tokens",
                    numbers={"least": -1, "most": may},
                )
            return may if most < 0 else most

        return self._cut(kept, min(self.least, most) if most >= 0 else 1, at_the_end=at_the_end)

    def fitted(self, output: int | None) -> RequestText:
        """This text without its beginning, as far as `output` tokens behind it need the room: FITTED of it stays at
        least, and None leaves no more."""

        def kept(may: int) -> int:
            least = int(may * FITTED)
            return max(least, may + 1 - output) if output else least

        return self._cut(kept, 1, at_the_end=False)

    def _cut(self, kept: Callable[[int], int], least: int, *, at_the_end: bool) -> RequestText:
        """`kept`: how many tokens stay of the most that it may have."""

        async def encode(may: int, tenant: Tenant) -> Sequence[int]:
            most = kept(may)
            return cut_tokens(await self.tokens(0, tenant), most, self._around, at_the_end=at_the_end)

        return RequestText(least, encode, short=self._short, goes_on=self.goes_on, ends=self.ends)

    async def tokens(self, most: int, tenant: Tenant) -> Sequence[int]:
        """Encoded by the first that asks. Raises what encoding raises."""
        if self._short:
            return await self._encode(most, tenant) if self._kept is None else self._kept
        if self._encoded is None:
            self._encoded = Once(lambda: self._encode(most, tenant))
        return await self._encoded.get()

    def kept(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """One copy, for all choices, of tokens that may be kept."""
        if self._kept is None:
            self._kept = tuple(tokens)
        return self._kept


@dataclass(slots=True, eq=False)
class Room:
    """Checks that are made once for all choices of a request: before the first takes any, whether its tenant has room
    for them; and the encoding of its bad words."""

    choices: int = 1
    asked: bool = False
    _bad_words: Once[list[tuple[int, ...]]] | None = None

    def bad_words(self, encode: Callable[[], Awaitable[list[tuple[int, ...]]]]) -> Once[list[tuple[int, ...]]]:
        """Tokens of the words, which are the same of each choice."""
        if self._bad_words is None:
            self._bad_words = Once(encode)
        return self._bad_words


@dataclass(slots=True, eq=False)
class Texts:
    """The texts that one session begins with."""

    prompt: RequestText
    prediction: RequestText | None = None
    """None: nothing is predicted, or the request itself says what."""
    choices: int = 1
    """Choices of this prompt."""
    room: Room = field(default_factory=Room)
    """The whole request's."""
    keep: Keep | None = None
    """None: the gateway keeps nothing with the session beside its request."""


def text_of(tokenizer: Tokenizer, text: str) -> RequestText:
    """A prompt. Raises InvalidArgument for a text above the size limit."""
    return RequestText(
        tokenizer.least_tokens(text),
        lambda _, tenant: tokenizer.encode(text, tenant),
        short=is_short(text),
        around=tokenizer.encoding.around,
    )


def cut_tokens(tokens: Sequence[int], most: int, around: tuple[int, int], *, at_the_end: bool) -> Sequence[int]:
    """`around`: tokens at the beginning and at the end that stay, as far as there is room for them."""
    if len(tokens) <= most:
        return tokens
    before, behind = around
    if most <= before + behind:  # nothing of the text would stay
        return tokens[:most] if at_the_end else tokens[len(tokens) - most :]
    end = len(tokens) - behind
    kept = most - before - behind
    text = tokens[before : before + kept] if at_the_end else tokens[end - kept : end]
    return [*tokens[:before], *text, *tokens[end:]]


def _counted(tokens: Sequence[int], count: int) -> Encode:
    """Tokens of which there are to be so many. None are there where no model took as many."""

    async def given(*_: Any) -> Sequence[int]:
        if len(tokens) < count:
            raise Unavailable("A model that takes such a prompt has just come; try again.", reason="NO_VERIFIER")
        return tokens

    return given


def part_of(tokenizer: Tokenizer, text: str) -> RequestText:
    """A prediction, which begins in the middle of a text. Raises InvalidArgument for a text above the size limit."""
    return RequestText(
        tokenizer.least_tokens(text), lambda _, tenant: tokenizer.encode_middle(text, tenant), short=is_short(text)
    )


def tokens_of(tokens: Sequence[int], *, goes_on: bool = True) -> RequestText:
    return RequestText(len(tokens), _given(tokens), short=True, goes_on=goes_on)


def _given(tokens: Sequence[int]) -> Encode:
    async def given(*_: Any) -> Sequence[int]:
        return tokens

    return given


async def chat_of(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> RequestText:
    """A conversation."""
    least = await tokenizer.least_chat_tokens(messages, tools, variables)
    short = is_short([messages, tools, variables])

    async def encode(most: int, tenant: Tenant) -> Sequence[int]:
        return await tokenizer.encode_chat(messages, tools, variables, most, tenant=tenant)

    return RequestText(least, encode, short=short, goes_on=goes_on(variables or {}), ends=tokenizer.chat_template.stops)


def message_of(tokenizer: Tokenizer, chat: gateway_pb2.Chat) -> RequestText:
    """A small conversation as gRPC's clients send it."""
    return RequestText(
        1,
        lambda most, tenant: tokenizer.encode_message(chat, most, tenant),
        goes_on=chat_goes_on(chat),
        ends=tokenizer.chat_template.stops,
    )


def texts_of_large(tokenizer: Tokenizer, large: LargeRequest) -> Texts | None:
    """The texts that were taken out of a request; None where none were."""
    prompt_ids, predicted = large.counts.get("prompt"), large.counts.get("prediction")
    prediction = None if predicted is None else RequestText(predicted, _counted(large.prediction, predicted))
    if large.chat:
        chat, ends = large.chat, tokenizer.chat_template.stops
        prompt = RequestText(
            large.least,
            lambda most, tenant: tokenizer.encode_large_message(chat, most, tenant),
            goes_on=large.goes_on,
            ends=ends,
        )
    elif prompt_ids is not None:
        prompt = RequestText(prompt_ids, _counted(large.prompt, prompt_ids))
    elif prediction is None:
        return None
    else:
        prompt = text_of(tokenizer, large.rest.prompt) if large.rest.prompt else tokens_of([])
    return Texts(prompt, prediction)
