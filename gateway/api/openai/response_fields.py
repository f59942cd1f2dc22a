"""The fields of a response's request, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.openai.chat import MAX_TOOLS, allowed_tools, content_of
from gateway.api.openai.fields import Fields, JsonSchemaField, ResponseFormat, SamplingFields, reasoning_variables
from gateway.text.chat_messages import MAX_MESSAGES, said_in
from gateway.work.pieces import in_pieces
from slipstream.errors import FIELD_MISSING, FIELDS_CONFLICT, InvalidArgument


class ContentPart(Fields):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    """The model's words instead of an answer, in a refusal."""


class InputItem(Fields):
    """A message, what the model reasoned, a call that it made, what the call gave, or the id of an item of an earlier
    response."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    """None: a message, or an id alone."""
    id: str | None = None
    role: str | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    """Stands for the reasoning of a client that has no more of it."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    @property
    def reference(self) -> str | None:
        """The id of the item that this one stands for; None where it is one itself."""
        alone = self.type is None and self.role is None and self.content is None
        return self.id or "" if self.type == "item_reference" or (alone and self.id) else None

    def as_template_data(self) -> dict[str, Any] | None:
        """The item as a message of a chat, the arguments of a call still as a text; None for reasoning, which belongs
        to the next message of the model."""
        if self.type == "reasoning":
            return None
        if self.type == "function_call":
            function = {"name": self.name or "", "arguments": self.arguments or "{}"}
            call = {"id": self.call_id, "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": content_of(self.output or ""), "tool_call_id": self.call_id}
        return {"role": self.role or "user", "content": content_of(self.content or "")}

    @property
    def reasoned(self) -> str:
        """The text of an item of reasoning."""
        return said_in(content_of(self.content or self.summary or ""))


async def messages_of(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """The items as messages of a chat, which `with_objects` makes ready for templates."""
    messages, reasoning = list[dict[str, Any]](), ""

    def add(item: InputItem) -> None:
        nonlocal reasoning
        data = item.as_template_data()
        if data is None:
            reasoning = item.reasoned
            return
        if reasoning and data["role"] == "assistant":
            data["reasoning_content"] = reasoning
        messages.append(data)
        reasoning = ""

    await in_pieces(add, items)
    return messages


class FunctionTool(Fields):
    type: Literal["function"] = "function"
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Fields):
    """As `response_format`, but the schema's fields stand beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextField(Fields):
    format: TextFormat | None = None
    verbosity: str | None = None


LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""


class ReasoningField(Fields):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


Input = str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
RETURNED = (
    *("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "text", "truncation", "reasoning"),
    *("tools", "tool_choice", "parallel_tool_calls", "background", "user", "safety_identifier", "prompt_cache_key"),
    "service_tier",
)
"""Fields of a request that its response has too, as they were sent."""


class ResponseTokensRequest(SamplingFields):
    """Fields that decide the prompt of a response."""

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    """The response that this one goes on from: its conversation comes before the input."""
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None

    reasoning: ReasoningField | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""

    def template_variables(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning else None
        return {**reasoning_variables(effort), **(self.chat_template_kwargs or {})}

    def system_data(self) -> list[dict[str, Any]]:
        """The instructions, which hold for this response alone."""
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def tool_data(self) -> list[dict[str, Any]]:
        if not self.tools or self.tool_choice == "none":
            return []
        fields, allowed = ("name", "description", "parameters"), allowed_tools(self.tool_choice)
        tools = [tool for tool in self.tools if allowed is None or tool.name in allowed]
        plain = [{name: value for name in fields if (value := getattr(tool, name)) is not None} for tool in tools]
        return [{"type": "function", "function": function} for function in plain]


class ResponseRequest(ResponseTokensRequest):
    max_output_tokens: int | None = Field(None, ge=1, le=2**32 - 1)
    prompt: dict[str, Any] | None = None
    """A prompt that OpenAI keeps; refused."""
    background: bool | None = None
    """Answer at once, and generate without a client."""
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    text: TextField | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: a conversation that leaves the output no room loses its beginning, as vLLM has it."""
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raises InvalidArgument for what this server does not do."""
        if self.background and self.store is False:
            raise InvalidArgument(
                "A response in the background is read later; leave store: false out.",
                reason=FIELDS_CONFLICT,
                field="store",
            )
        if self.prompt:
            raise InvalidArgument(
                "prompt is not served: nothing is kept under its id; send instructions and input.",
                reason="FIELD_NOT_SERVED",
                field="prompt",
            )
        if self.choices != 1:
            raise InvalidArgument("A response has one choice; leave n out.", reason="FIELD_NOT_SERVED", field="n")
        if self.text and self.text.format:
            self.response_format = _response_format(self.text.format)
        self.max_tokens = self.max_output_tokens or self.max_tokens

    async def returned(self) -> dict[str, Any]:
        """Fields of the request that the response repeats. Raises InvalidArgument for values that are nested too
        deeply."""
        written: dict[str, Any] = {"exclude_unset": True, "by_alias": True, "mode": "json"}
        try:
            asked = self.model_dump(include=set(RETURNED) - {"tools"}, **written)
            if self.tools is not None:
                asked["tools"] = await in_pieces(lambda tool: tool.model_dump(**written), self.tools)
            return asked
        except ValueError as error:
            raise InvalidArgument(
                "The request is nested too deeply; make its tools flatter.",
                reason="TOO_DEEP",
                field="tools",
            ) from error

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema_ is None:
        raise InvalidArgument("text.format json_schema has no schema.", reason=FIELD_MISSING, field="text")
    return ResponseFormat(type=format.type, json_schema=JsonSchemaField(schema=format.schema_))
