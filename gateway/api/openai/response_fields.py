"""The fields of a response's request, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.openai.chat import MAX_TOOLS, parsed_arguments
from gateway.api.openai.fields import Fields, JsonSchemaField, ResponseFormat, SamplingFields, reasoning_variables
from gateway.text.chat_messages import MAX_MESSAGES
from slipstream.errors import InvalidArgument


class ContentPart(Fields):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class InputItem(Fields):
    """A message, what the model reasoned, a call that it made, or what the call gave."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """Stands for the reasoning of a client that has no more of it."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None

    def as_template_data(self) -> dict[str, Any] | None:
        """The item as a message of a chat; None for reasoning, which belongs to the next message of the model."""
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            function = {"name": self.name or "", "arguments": parsed_arguments(self.arguments or "")}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": self.output or "", "tool_call_id": self.call_id}
        return {"role": self.role or "user", "content": self.text}

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or self.summary or ())


def messages_of(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """The items as messages of a chat."""
    messages, reasoning = list[dict[str, Any]](), ""
    for item in items:
        data = item.as_template_data()
        if data is None:
            reasoning = item.text
            continue
        if reasoning and data["role"] == "assistant":
            data["reasoning_content"] = reasoning
        messages.append(data)
        reasoning = ""
    return messages


class FunctionTool(Fields):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(Fields):
    """As `response_format`, but the schema's fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextField(Fields):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningField(Fields):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponseRequest(SamplingFields):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**32 - 1)
    background: bool | None = None
    """Answer at once, and generate without a client."""
    previous_response_id: str | None = None
    """The response that this one goes on from: its conversation comes before the input."""
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    text: TextField | None = None
    truncation: str | None = None
    reasoning: ReasoningField | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raises InvalidArgument for what this server does not do."""
        if self.background and self.store is False:
            raise InvalidArgument("A response in the background is read later; leave store: false out.")
        if self.choices != 1:
            raise InvalidArgument("A response has one choice; leave n out.")
        if self.text and self.text.format:
            self.response_format = _response_format(self.text.format)
        self.max_tokens = self.max_output_tokens or self.max_tokens

    def system_data(self) -> list[dict[str, Any]]:
        """The instructions, which hold for this response alone."""
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def template_variables(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning else None
        return {**reasoning_variables(effort), **(self.chat_template_kwargs or {})}

    def template_data(self) -> list[dict[str, Any]]:
        """The input as messages of a chat."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)

    def tool_data(self) -> list[dict[str, Any]]:
        if not self.tools or self.tool_choice == "none":
            return []
        fields = ("name", "description", "parameters")
        plain = [{name: value for name in fields if (value := getattr(tool, name)) is not None} for tool in self.tools]
        return [{"type": "function", "function": function} for function in plain]


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema_ is None:
        raise InvalidArgument("text.format json_schema has no schema.")
    return ResponseFormat(type=format.type, json_schema=JsonSchemaField(schema=format.schema_))
