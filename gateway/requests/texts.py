"""The texts of one request, encoded when all cheaper checks have passed, and once for all of its choices."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.auth.tenant import Tenant
from gateway.text.chat_messages import MAX_MESSAGES, Message, chat_goes_on, goes_on
from gateway.text.tokenizer import Tokenizer, is_short
from gateway.work.once import Once
from slipstream.errors import NUMBER_OUT_OF_RANGE, InvalidArgument
from slipstream.v1 import gateway_pb2

Encode = Callable[[int, Tenant], Awaitable[Sequence[int]]]
"""Token ids, made as the tenant's work; may refuse a text of more than so many."""


Keep = Callable[[], Awaitable[bytes]]
"""Makes what the gateway keeps with a session."""


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
        """This text without its beginning, as far as `output` tokens behind it need the room; they have half of it at
        most, and None half."""
        return self._cut(lambda may: max(may // 2, may + 1 - output) if output else may // 2, 1, at_the_end=False)

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
    """Whether a request's tenant has room for all of its choices is asked once, before the first takes any."""

    choices: int = 1
    asked: bool = False


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


def part_of(tokenizer: Tokenizer, text: str) -> RequestText:
    """A prediction, which begins in the middle of a text. Raises InvalidArgument for a text above the size limit."""
    return RequestText(
        tokenizer.least_tokens(text), lambda _, tenant: tokenizer.encode_middle(text, tenant), short=is_short(text)
    )


def tokens_of(tokens: Sequence[int], *, goes_on: bool = True) -> RequestText:
    async def given(*_: Any) -> Sequence[int]:
        return tokens

    return RequestText(len(tokens), given, short=True, goes_on=goes_on)


def chat_of(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> RequestText:
    """A conversation."""
    least = tokenizer.least_chat_tokens(messages, tools, variables)
    short = is_short([messages, tools, variables])

    async def encode(most: int, tenant: Tenant) -> Sequence[int]:
        return await tokenizer.encode_chat(messages, tools, variables, most, tenant=tenant)

    return RequestText(least, encode, short=short, goes_on=goes_on(variables or {}), ends=tokenizer.chat_template.stops)


def message_of(tokenizer: Tokenizer, chat: gateway_pb2.Chat) -> RequestText:
    """A conversation as gRPC's clients send it."""
    stops = tokenizer.chat_template.stops
    said = [{"role": each.role, "content": each.content} for each in chat.messages[: MAX_MESSAGES + 1]]
    # Another of the model's templates may be named there, and fields may replace what a message says.
    plain = not chat.template_variables_json and not any(each.fields_json for each in chat.messages)
    least = tokenizer.least_chat_tokens(said) if plain else 1
    return RequestText(
        least, lambda most, tenant: tokenizer.encode_message(chat, most, tenant), goes_on=chat_goes_on(chat), ends=stops
    )
