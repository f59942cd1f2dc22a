"""Constraint and reading of the answer to a request: as text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gateway.config import GatewayConfig
from gateway.text.answers.formats import NONE, THOUGHTS, AnswerFormat, answer_format, fitting
from gateway.text.answers.grammar import CLOSED, OPEN, PLAIN, structure_of
from gateway.text.answers.reader import AnswerReader, CallBegan
from gateway.text.answers.reasoning_tokens import ReasoningTokens
from gateway.text.chat_messages import CONTINUE, REASONING, Message, said_in
from gateway.text.chat_template import NAMED
from gateway.text.detokenizer import TokenDecoder
from gateway.text.tokenizer import Tokenizer
from gateway.work.pieces import in_pieces, is_short
from slipstream.errors import InvalidArgument
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import gateway_pb2, types_pb2

_PROBE: Sequence[Message] = ({"role": "user", "content": "x"},)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    format: AnswerFormat = field(default_factory=AnswerFormat)
    tokenizer: Tokenizer | None = None
    """None where everything is text."""
    structure: StructuredOutput | None = None
    """Structure that the output must have."""
    shown: Sequence[int] = ()
    """Special tokens whose text the reader needs."""
    opened: bool | None = None
    """Whether the answer goes on within reasoning; None: as the prompt ends."""
    reasoning_limit: types_pb2.ReasoningLimit | None = None
    """None: the model ends its reasoning itself."""

    def reader(self, started: gateway_pb2.Started) -> AnswerReader:
        """A reader of the session's whole output."""
        return self.format.reader(opened=self._opened(started.prompt_token_ids), within=bool(self.opened))

    def reasoning_tokens(self, started: gateway_pb2.Started) -> ReasoningTokens | None:
        """Counts those of the session's output; None where there are none."""
        if self.tokenizer is None or self.format.thoughts == NONE:
            return None
        opened = self._opened(started.prompt_token_ids)
        return ReasoningTokens(self.format, self.tokenizer.encoding.decoder, opened=opened)

    def call_id(self, started: gateway_pb2.Started, index: int, call: CallBegan) -> str:
        """The id of the session's call number `index`."""
        return self.format.call_id(started.session_id, index, call)

    def _opened(self, prompt: Sequence[int]) -> bool:
        begin = self.format.begin_of_thoughts
        if self.opened is not None or not begin or self.tokenizer is None:
            return bool(self.opened)
        return self.tokenizer.encoding.decoder.ending(prompt).rstrip().endswith(begin)


@dataclass(frozen=True, slots=True)
class AnswerWish:
    """Fields of a request about its answer."""

    tools: Sequence[Mapping[str, Any]]
    """As templates know them."""
    variables: Mapping[str, Any]
    """Variables of the template."""
    name: str | None = None
    """Name of the tool that has to be called, or ANY; None where the model decides."""
    own: StructuredOutput | None = None
    """The structure that the request asks for."""
    single: bool = False
    """One call at most."""
    last: Message | None = None
    """The conversation's last message, which the answer may go on with."""
    most_reasoning: int | None = None
    """Tokens of reasoning."""


def plan_of(tokenizer: Tokenizer, config: GatewayConfig, wish: AnswerWish) -> AnswerPlan:
    """Raises FailedPrecondition for tools that the template does not take, and InvalidArgument for a forced call of a
    tool that is not among them."""
    template = template_source(tokenizer, wish.tools, wish.variables)
    settings = config.tool_calls, config.reasoning
    forced = wish.name is not None
    format = answer_format(template, wish.tools, settings, forced=forced, single=wish.single)
    decoder = tokenizer.encoding.decoder
    opened = _goes_on_within(wish, format)
    end = partial(_end_of_prompt, tokenizer, format, wish, opened)
    structure = structure_of(format, wish.tools, wish.name, wish.own, end, decoder.control_token)
    if format.plain:
        return AnswerPlan(format, None, structure)
    limit = None if structure is not None else _reasoning_limit(format, wish, decoder)
    return AnswerPlan(format, tokenizer, structure, decoder.specials(format.marks), opened, limit)


def template_source(tokenizer: Tokenizer, tools: Sequence[Any], variables: Mapping[str, Any]) -> str:
    """The template in Jinja that a conversation with these tools and variables has. Raises what `ChatTemplate.source`
    raises; without tools a model without a template has an empty one, and the error where the conversation is
    written."""
    template = tokenizer.chat_template
    if template.given is None and not tools:
        return ""
    return template.source(tools=bool(tools), name=variables.get(NAMED))


async def fitted_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any], variables: Mapping[str, Any]
) -> list[Message]:
    """The messages as the conversation's template reads them. Raises what `template_source` raises."""
    fit = fitting(template_source(tokenizer, tools, variables))
    return list(messages) if fit is None else await in_pieces(fit, messages)


def _reasoning_limit(format: AnswerFormat, wish: AnswerWish, decoder: TokenDecoder) -> types_pb2.ReasoningLimit | None:
    """None where no limit is asked for, or a mark of the model's is no token of its own."""
    thoughts = THOUGHTS.get(format.thoughts)
    if wish.most_reasoning is None or thoughts is None:
        return None
    begin, end = decoder.control_token(thoughts.begin), decoder.control_token(thoughts.end)
    if begin is None or end is None:
        return None
    return types_pb2.ReasoningLimit(max_tokens=wish.most_reasoning, begin_token_id=begin, end_token_id=end)


def _goes_on_within(wish: AnswerWish, format: AnswerFormat) -> bool | None:
    """Whether the answer goes on with reasoning that is not closed; None where it does not go on with a message."""
    part = wish.variables.get(CONTINUE)
    if not part or wish.last is None:
        return None
    if part in REASONING:
        return True
    thoughts = THOUGHTS.get(format.thoughts)
    if thoughts is None:
        return False
    said = said_in(wish.last.get(part if isinstance(part, str) else "content"))
    return said.rfind(thoughts.begin) > said.rfind(thoughts.end)


def _end_of_prompt(tokenizer: Tokenizer, format: AnswerFormat, wish: AnswerWish, opened: bool | None) -> str:
    """Returns the end of prompts, from a short one: the structure is compiled before the request's prompt is
    written."""
    if opened is not None:
        return OPEN if opened else CLOSED
    thoughts, tools = THOUGHTS.get(format.thoughts), wish.tools[:1]
    if thoughts is None or not is_short([list(tools), wish.variables]):
        return PLAIN
    try:
        ending = tokenizer.chat_template.render(_PROBE, tools, wish.variables).rstrip()
    except InvalidArgument:
        return PLAIN
    return OPEN if ending.endswith(thoughts.begin) else CLOSED if ending.endswith(thoughts.end) else PLAIN
