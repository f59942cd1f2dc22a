"""The fields of Anthropic's messages, and the conversation and limits that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.openai.chat import MAX_TOOLS
from gateway.api.openai.fields import (
    Fields,
    RequestFields,
    SamplingFields,
    SpeculationField,
    Strings,
    reasoning_variables,
    thinking_variables,
)
from gateway.text.answers.grammar import ANY
from gateway.text.chat_messages import CONTINUE, MAX_MESSAGES
from gateway.work.pieces import in_pieces
from slipstream.errors import NUMBER_OUT_OF_RANGE, InvalidArgument

ROLES = {"assistant": "assistant", "system": "system"}
"""Every other role, such as those that tools of Anthropic's make up, is a user's."""


class Block(Fields):
    """A part of a message: text, a document of text, a call of the model's, what the call gave, or what the model
    reasoned."""

    type: Literal["text", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: dict[str, Any] | None = None
    """Source of a document."""
    title: str | None = None
    context: str | None = None
    """Description of a document."""
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Content = str | Annotated[list[Block], Field(fail_fast=True)]


class Message(Fields):
    role: str
    content: Content

    def as_template_data(self) -> list[dict[str, Any]]:
        """The message as messages of a chat: results of calls are messages of their own there."""
        role = ROLES.get(self.role, "user")
        if isinstance(self.content, str):
            return [{"role": role, "content": self.content}]
        data: list[dict[str, Any]] = [_result(block) for block in self.content if block.type == "tool_result"]
        calls = [_call(block) for block in self.content if block.type == "tool_use"]
        text = _text(self.content)
        if text or calls or not data:
            reasoning = "\n".join(block.thinking for block in self.content if block.thinking)
            more = {"tool_calls": calls, "reasoning_content": reasoning if role == "assistant" else ""}
            data.append({"role": role, "content": text} | {name: value for name, value in more.items() if value})
        return data


class Tool(Fields):
    type: Literal["custom"] | None = None
    """No tool of Anthropic's own is served: models here know none, and nothing here would run it."""
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool to call."""
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=2**32 - 1)
    """Most tokens of reasoning, where its marks are tokens of their own and nothing else holds the output."""
    display: str | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = None
    """Format that the text must have."""
    effort: str | None = None


class CountRequest(RequestFields):
    model: str = ""
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""

    async def template_data(self) -> list[dict[str, Any]]:
        system = self.system if isinstance(self.system, str | None) else await _text_in_pieces(self.system)
        made, turn = list[dict[str, Any]](), _Turn()
        if system:
            made.append({"role": "system", "content": system})

        def add(said: Message) -> None:
            for message in said.as_template_data():
                if not turn.takes(message):
                    made.extend(turn.taken())
                turn.add(message)

        await in_pieces(add, self.messages)
        return [*made, *turn.taken()]

    def template_variables(self) -> dict[str, Any]:
        """A last message of the model's own is the beginning of the answer."""
        effort = self.output_config.effort if self.output_config else None
        thinking = {} if self.thinking is None else thinking_variables(on=self.thinking.type != "disabled")
        given = {**thinking, **reasoning_variables(effort), **(self.chat_template_kwargs or {})}
        begun = self.messages[-1].as_template_data()[-1]
        prefilled = begun["role"] == "assistant" and begun["content"] and "tool_calls" not in begun
        return given | ({CONTINUE: True} if prefilled else {})

    def tool_data(self) -> list[dict[str, Any]]:
        """The tools as templates know them; none where the model is to call none."""
        if not self.tools or (self.tool_choice and self.tool_choice.type == "none"):
            return []
        return [{"type": "function", "function": _function(tool)} for tool in self.tools]

    @property
    def one_call(self) -> bool:
        return bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    @property
    def forced_name(self) -> str | None:
        """The tool that has to be called; None where the model decides. Raises InvalidArgument for one without name."""
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return None
        if choice.type == "tool" and not choice.name:
            raise InvalidArgument("tool_choice of type tool has no name.", reason="TOOL_CHOICE", field="tool_choice")
        return choice.name if choice.type == "tool" else ANY


class MessageRequest(CountRequest):
    max_tokens: int = Field(ge=1, le=2**32 - 1)
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = Field(None, ge=-1, le=2**32 - 1)
    top_p: float | None = None
    output_format: OutputFormat | None = None
    """The beta's name of `output_config.format`."""
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    cache_salt: str | None = None
    speculation: SpeculationField | None = None
    mixed_arithmetic: bool | None = None

    @property
    def most_reasoning(self) -> int | None:
        """Raises InvalidArgument for a budget that leaves nothing for the answer."""
        budget = self.thinking.budget_tokens if self.thinking and self.thinking.type == "enabled" else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidArgument(
                f"max_tokens must be greater than thinking.budget_tokens, and is {self.max_tokens}; raise it, or lower "
                f"the budget of {budget}.",
                reason=NUMBER_OUT_OF_RANGE,
                field="max_tokens",
                numbers={"least": budget + 1},
            )
        return budget

    def sampling(self) -> SamplingFields:
        same = (
            *("model", "max_tokens", "temperature", "top_k", "top_p", "seed"),
            *("cache_salt", "speculation", "mixed_arithmetic"),
        )
        fields = {name: getattr(self, name) for name in same}
        return SamplingFields.model_validate(fields | {"stop": self.stop_sequences} | self._format())

    def _format(self) -> dict[str, Any]:
        """The format of the text, as OpenAI's requests have it."""
        asked = (self.output_config.format if self.output_config else None) or self.output_format
        if asked is None:
            return {}
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": asked.schema_}}}


class _Turn:
    """Messages of one role that follow one another, which are one message, as Anthropic has it: many templates want
    roles to alternate."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._texts: list[str] = []

    def takes(self, message: dict[str, Any]) -> bool:
        role = message["role"]
        own = self._message.get("role")
        return role in ("user", "assistant") and own == role and not self._message.get("tool_calls")

    def add(self, message: dict[str, Any]) -> None:
        self._message |= message
        self._texts.append(message["content"])

    def taken(self) -> list[dict[str, Any]]:
        """The message that was made, if there is one; another one begins."""
        made, texts = self._message, self._texts
        self._message, self._texts = {}, []
        if len(texts) > 1:
            made["content"] = "\n".join(text for text in texts if text)
        return [made] if made else []


def _text(blocks: Iterable[Block]) -> str:
    return "\n".join(_said(block) for block in blocks if _is_text(block))


async def _text_in_pieces(blocks: Iterable[Block]) -> str:
    return "\n".join(await in_pieces(_said, (block for block in blocks if _is_text(block))))


def _said(block: Block) -> str:
    return _document(block) if block.type == "document" else block.text or ""


def _is_text(block: Block) -> bool:
    return block.type in ("text", "document")


def _document(block: Block) -> str:
    """Raises InvalidArgument for one that is no text."""
    source = block.source or {}
    given = source.get("data") if source.get("type") == "text" else source.get("content")
    text = given if isinstance(given, str) else _part_texts(given or [{}])
    return "\n".join(each for each in (block.title, block.context, text) if each)


def _part_texts(parts: Any) -> str:
    """Raises InvalidArgument for a part that is no text, such as an image."""
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise InvalidArgument(
            "A document or a tool's result holds what is no text; images and files are not served.",
            reason="FIELD_NOT_SERVED",
            field="messages",
        )
    return "\n".join(part["text"] for part in parts)


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: Block) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        content = _part_texts(content)
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return function if tool.input_schema is None else function | {"parameters": tool.input_schema}
