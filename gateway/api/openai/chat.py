"""`/v1/chat/completions`: the messages become a prompt by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.api.http.choices import Choice, last_position, wants_ids
from gateway.api.http.entry import context_of
from gateway.api.http.parts import HttpParts
from gateway.api.http.reply import Answer
from gateway.api.openai.call import Call, ChoiceStream, ending, finite
from gateway.api.openai.fields import Fields, SamplingFields, TextPart, log_unknown
from gateway.request_context import RequestContext
from gateway.requests.chat import MAX_MESSAGES
from gateway.sessions.output_stream import Event
from slipstream.errors import InvalidArgument
from slipstream.v1 import gateway_pb2


class FunctionCall(Fields):
    name: str
    arguments: str


class ToolCall(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Fields):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    def as_template_data(self) -> dict[str, Any]:
        """The message as templates know it: content is one text, arguments of tool calls are objects. Raises
        InvalidArgument for arguments that are not a JSON object."""
        content = (
            self.content if isinstance(self.content, str | None) else "\n".join(part.text for part in self.content)
        )
        data: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "reasoning_content", "tool_call_id"):
            data[name] = getattr(self, name)
        if self.tool_calls:
            data["tool_calls"] = [_call_data(call) for call in self.tool_calls]
        return data


class ChatFields(SamplingFields):
    """The prompt of a chat."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""

    def template_data(self) -> list[dict[str, Any]]:
        return [message.as_template_data() for message in self.messages]


class ChatRequest(ChatFields):
    max_completion_tokens: int | None = Field(None, ge=1, le=2**32 - 1)
    """Comes before `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    verbosity: str | None = None


def routes(parts: HttpParts) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Answer:
        """Answers a conversation."""
        log_unknown(asked)
        context = context_of(request.scope)
        position = last_position(context)
        ids = position is not None or wants_ids(context, request.query_params)
        prompt = [] if position else await chat_prompt(parts, asked)
        return ChatCall(parts, context, asked, prompt).answer(position, ids=ids)

    return router


async def chat_prompt(parts: HttpParts, asked: ChatFields) -> list[int]:
    """Token ids of the conversation, up to where the answer begins. Raises FailedPrecondition for a model without a
    chat template, InvalidArgument for messages that it refuses."""
    return await parts.tokenizer.encode_chat(asked.template_data(), variables=asked.chat_template_kwargs)


class ChatCall(Call):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def __init__(self, parts: HttpParts, context: RequestContext, asked: ChatRequest, prompt: Sequence[int]) -> None:
        if asked.max_completion_tokens is not None:
            asked.max_tokens = asked.max_completion_tokens
        requests = [asked.to_generate(prompt, index) for index in range(asked.choices)]
        for request in requests:
            request.logprobs, request.top_logprobs = bool(asked.logprobs), asked.top_logprobs or 0
        super().__init__(parts, context, asked, requests)

    async def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._choice(choice, {"message": message})

    async def chunk_choice(self, stream: ChoiceStream, event: Event) -> dict[str, Any] | None:
        choice = stream.choice
        if isinstance(event, gateway_pb2.Started):
            return None if stream.resumed else self._choice(choice, {"delta": {"role": "assistant", "content": ""}})
        if not (choice.text or choice.finished):
            return None
        return self._choice(choice, {"delta": {"content": choice.text} if choice.text else {}})

    def _choice(self, choice: Choice, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"content": [_logprob(each) for each in choice.logprobs], "refusal": None}
        made = {
            "index": choice.index,
            **content,
            "logprobs": logprobs if self.asked.logprobs else None,
            **ending(choice.finished),
        }
        if self.asked.return_token_ids:
            made["token_ids"] = list(choice.token_ids)
            made["prompt_token_ids"] = list(choice.started.prompt_token_ids)
        return made


def _call_data(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("The arguments of a tool call in messages are not JSON.") from error
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _logprob(logprob: gateway_pb2.Logprob) -> dict[str, Any]:
    top = [_token(each.token, each.logprob) for each in logprob.top]
    return {**_token(logprob.token, logprob.logprob), "top_logprobs": top}


def _token(token: gateway_pb2.TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.bytes)}
