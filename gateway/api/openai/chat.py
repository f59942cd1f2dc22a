"""`/v1/chat/completions`: the messages become a prompt by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from gateway.api.http.body import BodyRoute
from gateway.api.http.choices import Choice, last_position
from gateway.api.http.dependencies import HttpDependencies
from gateway.api.http.entry import context_of
from gateway.api.http.reply import Answer
from gateway.api.openai.call import Call, ChoiceStream, finite
from gateway.api.openai.call_arguments import as_object
from gateway.api.openai.fields import (
    CutPromptFields,
    Fields,
    RequestFields,
    log_unknown,
    reasoning_variables,
)
from gateway.request_context import RequestContext
from gateway.requests.answers import AnswerPlan, AnswerWish, fitted_chat, plan_of
from gateway.requests.texts import RequestText, chat_of
from gateway.sessions.output_stream import Event
from gateway.text.answers.grammar import ANY
from gateway.text.answers.reader import Arguments, CallBegan, Part, Reasoning, joined
from gateway.text.chat_messages import CONTINUE, GENERATE, MAX_MESSAGES
from gateway.text.chat_template import NAMED
from gateway.work.pieces import in_pieces
from slipstream.errors import FIELD_MISSING, FIELDS_CONFLICT, InvalidArgument
from slipstream.v1 import gateway_pb2

ALLOWED = "allowed_tools"
"""A `tool_choice` that names some of the tools."""
MAX_TOOLS = 512
"""Most tools of one request."""


class FunctionCall(Fields):
    name: str
    arguments: str


class ToolCallField(Fields):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class MessagePart(Fields):
    """Text, or what the model said instead of an answer."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class ChatMessage(Fields):
    role: str
    content: str | Annotated[list[MessagePart], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    """The model's words instead of an answer, where there is no content."""
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Same as `reasoning`, under the name that templates know."""
    tool_calls: Annotated[list[ToolCallField], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """The one call of a message, as requests with `functions` have it; its result is a message of role `function`."""

    def as_template_data(self) -> dict[str, Any]:
        """The message as templates know it: content is a text or parts that are texts, arguments of tool calls are
        objects."""
        content = self.refusal if self.content is None else content_of(self.content)
        data: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "reasoning", "tool_call_id"):
            data[name] = getattr(self, name)
        data["reasoning_content"] = self.reasoning_content or self.reasoning
        calls = self.tool_calls
        if self.function_call is not None:
            calls = [ToolCallField(id=_function_id(self.function_call.name), function=self.function_call)]
        if calls:
            data["tool_calls"] = [_call_data(call) for call in calls]
        if self.role == "function":
            data |= {"role": "tool", "tool_call_id": _function_id(self.name or "")}
        return data


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class FunctionField(Fields):
    model_config = ConfigDict(extra="allow")  # templates may read more of a tool
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class NamedFunction(Fields):
    name: str


class ToolField(Fields):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: FunctionField


class ConversationFields(RequestFields):
    """The prompt of a chat."""

    messages: Messages
    tools: Annotated[list[ToolField], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    functions: Annotated[list[FunctionField], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    """The tools, as OpenAI's clients sent them before there were tools; the answer has `function_call` then."""
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    """Their `tool_choice`."""
    chat_template: str | None = None
    """Name of one of the model's templates, where it has several. No template is taken from a request."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    """Documents that some templates put before the conversation, for answers that quote them."""
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """True: the answer goes on with the last message."""

    def template_variables(self) -> dict[str, Any]:
        asked = {name: getattr(self, name) for name in (NAMED, "documents", GENERATE, CONTINUE)}
        given = {**reasoning_variables(self.reasoning_effort), **(self.chat_template_kwargs or {})}
        return {**given, **{name: on for name, on in asked.items() if on is not None}}

    async def template_data(self) -> list[dict[str, Any]]:
        return await in_pieces(ChatMessage.as_template_data, self.messages or ())

    async def tool_data(self) -> list[dict[str, Any]]:
        """The tools as templates know them; none where the model is to call none. Raises InvalidArgument for
        `functions` beside `tools`, and for a `function_call` without functions."""
        tools, choice = self.tools, self.choice
        if self.functions:
            if tools:
                raise InvalidArgument(
                    "functions and tools exclude each other; send tools.", reason=FIELDS_CONFLICT, field="functions"
                )
            tools = [ToolField(function=each) for each in self.functions]
        if not tools or choice == "none":
            return []
        allowed = allowed_tools(choice)
        kept = [tool for tool in tools if allowed is None or tool.function.name in allowed]
        return await in_pieces(lambda tool: tool.model_dump(exclude_none=True), kept)

    @property
    def choice(self) -> str | dict[str, Any] | None:
        """`tool_choice`, or what `function_call` says as one."""
        asked = self.function_call
        if isinstance(asked, NamedFunction):
            if not self.functions:
                raise InvalidArgument(
                    "function_call names a function, and there are no functions; send them.",
                    reason=FIELD_MISSING,
                    field="functions",
                )
            return {"type": "function", "function": {"name": asked.name}}
        return asked or self.tool_choice


class ChatRequest(ConversationFields, CutPromptFields):
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=2**32 - 1)
    """Comes before `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    verbosity: str | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=2**32 - 1)
    """Most tokens of reasoning, as vLLM has it."""


def routes(parts: HttpDependencies) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

    @router.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Answer:
        """Answers a conversation."""
        log_unknown(asked)
        context = context_of(request.scope)
        position = last_position(context)
        tools, variables = await asked.tool_data(), asked.template_variables()
        wish = AnswerWish(
            *(tools, variables, forced_name(asked.choice), asked.structure()),
            single=asked.parallel_tool_calls is False or bool(asked.functions),
            last=asked.messages[-1].as_template_data(),
            most_reasoning=asked.thinking_token_budget,
        )
        plan = plan_of(parts.tokenizer, parts.config, wish)
        data = [] if position else await asked.template_data()
        messages = await fitted_chat(parts.tokenizer, data, tools, variables)
        prompt = asked.cut(await chat_of(parts.tokenizer, messages, tools, variables))
        return ChatCall(parts, context, asked, prompt, plan).answer(position, request.query_params)

    return router


class ChatCall(Call):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    asked: ChatRequest

    def __init__(
        self,
        parts: HttpDependencies,
        context: RequestContext,
        asked: ChatRequest,
        prompt: RequestText,
        plan: AnswerPlan,
    ) -> None:
        if asked.max_completion_tokens is not None:
            asked.max_tokens = asked.max_completion_tokens
        requests = [asked.to_generate(None, index, plan) for index in range(asked.choices)]
        for request in requests:
            request.logprobs, request.top_logprobs = bool(asked.logprobs), asked.top_logprobs or 0
        super().__init__(parts, context, asked, requests, asked.texts([prompt], parts.tokenizer))
        self._plan = plan
        self._answers: dict[int, _Answer] = {}
        """By index of the choice."""
        self.rereads = not plan.format.plain

    async def whole_choice(self, choice: Choice) -> dict[str, Any]:
        answer = self._answers[choice.index] = _Answer(choice, self._plan)
        if answer.reasoned is not None:
            answer.reasoned.add(choice.token_ids)
        delta = answer.read(choice.text, finished=True)
        calls = delta.pop("tool_calls", [])
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None} | delta
        if not delta and not calls:
            message["content"] = ""
        if calls and self.asked.functions:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return await self._choice(choice, {"message": message}, called=answer.calls > 0)

    async def chunk_choice(self, stream: ChoiceStream, event: Event) -> dict[str, Any] | None:
        choice = stream.choice
        if isinstance(event, gateway_pb2.Started):
            self._answers[choice.index] = _Answer(choice, self._plan)
            if stream.resumed:
                return None
            return await self._choice(choice, {"delta": {"role": "assistant", "content": ""}})
        answer = self._answers[choice.index]
        if answer.reasoned is not None and isinstance(event, gateway_pb2.Delta):
            answer.reasoned.add(event.token_ids)
        delta = answer.read(stream.take_text(), finished=choice.finished is not None, known=stream.known)
        if not (delta or choice.finished):
            return None
        if self.asked.functions and "tool_calls" in delta:
            delta["function_call"] = delta.pop("tool_calls")[0]["function"]
        return await self._choice(choice, {"delta": delta}, called=answer.calls > 0)

    @property
    def reasoning_tokens(self) -> int:
        return sum(answer.reasoned.count for answer in self._answers.values() if answer.reasoned)

    async def _choice(self, choice: Choice, content: dict[str, Any], *, called: bool = False) -> dict[str, Any]:
        logprobs = {"content": await in_pieces(logprob_entry, choice.logprobs), "refusal": None}
        made = {
            "index": choice.index,
            **content,
            "logprobs": logprobs if self.asked.logprobs else None,
            **self.ending(choice.finished),
        }
        if called and made["finish_reason"] == "stop" and forced_name(self.asked.choice) in (None, ANY):
            made["finish_reason"] = "function_call" if self.asked.functions else "tool_calls"
        if self.asked.return_token_ids:
            made["token_ids"] = list(choice.token_ids)
            made["prompt_token_ids"] = list(choice.started.prompt_token_ids)
        return made


class _Answer:
    """Reads the text of one choice as text, reasoning and calls."""

    def __init__(self, choice: Choice, plan: AnswerPlan) -> None:
        self._started = choice.started
        self._plan = plan
        self._reader = plan.reader(choice.started)
        self.reasoned = plan.reasoning_tokens(choice.started)
        self.calls = 0
        """Calls so far."""

    def read(self, text: str, *, finished: bool, known: int = 0) -> dict[str, Any]:
        """Returns the certain part of the answer, as the delta of a chunk. `known`: characters of `text` that the
        client has; their content is not returned again."""
        if known:
            self._taken(self._reader.push(text[:known]))
        parts = self._reader.push(text[known:]) + (self._reader.finish() if finished else [])
        return self._taken(parts)

    def _taken(self, parts: Sequence[Part]) -> dict[str, Any]:
        if len(parts) == 1 and isinstance(parts[0], str):
            return {"content": parts[0]}
        text = [part for part in parts if isinstance(part, str)]
        reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
        delta: dict[str, Any] = {"content": "".join(text)} if text else {}
        if reasoning:
            delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
        if calls := self._calls(parts):
            delta["tool_calls"] = calls
        return delta

    def _calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """The calls that begin with these parts, and first what they have of the call that is open."""
        calls: list[dict[str, Any]] = []
        for part in joined(parts):
            if isinstance(part, CallBegan):
                id, function = self._plan.call_id(self._started, self.calls, part), {"name": part.name, "arguments": ""}
                calls.append({"index": self.calls, "id": id, "type": "function", "function": function})
                self.calls += 1
            elif isinstance(part, Arguments) and calls:
                calls[-1]["function"]["arguments"] = part.text
            elif isinstance(part, Arguments):
                calls.append({"index": self.calls - 1, "function": {"arguments": part.text}})
        return calls


def forced_name(choice: str | Mapping[str, Any] | None) -> str | None:
    """The tool that has to be called; None where the model decides. Raises InvalidArgument for no such choice."""
    if choice is None or isinstance(choice, str):
        return ANY if choice == "required" else None
    if choice.get("type") == ALLOWED:
        return ANY if _allowed(choice).get("mode") == "required" else None
    function = choice.get("function", choice)  # the Responses API has the name beside the type
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str) or not name:
        raise InvalidArgument(
            "tool_choice is none, auto, required, allowed_tools or a function with its name.",
            reason="TOOL_CHOICE",
            field="tool_choice",
        )
    return name


def allowed_tools(choice: str | Mapping[str, Any] | None) -> set[str] | None:
    """The names of the tools that may be called, where a choice names some of them; None: all. Raises InvalidArgument
    for what is no such choice."""
    if not isinstance(choice, Mapping) or choice.get("type") != ALLOWED:
        return None
    allowed = _allowed(choice)
    tools = allowed.get("tools")
    if allowed.get("mode") not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidArgument(
            "allowed_tools has a mode, auto or required, and tools.", reason="TOOL_CHOICE", field="tool_choice"
        )
    return {name for tool in tools if (name := forced_name(tool if isinstance(tool, Mapping) else {})) is not None}


def _allowed(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Chats have them under their type, the Responses API beside it."""
    allowed = choice.get(ALLOWED, choice)
    return allowed if isinstance(allowed, Mapping) else {}


class Said(Protocol):
    """A part of a message."""

    text: str
    refusal: str


def content_of(content: str | Sequence[Said]) -> str | list[dict[str, str]]:
    """A content as templates know it: a text, or parts, each with its text or what the model said instead of an
    answer."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text or part.refusal} for part in content]


def _function_id(name: str) -> str:
    """The id by which templates put a call and its result together, where requests have none."""
    return f"call_{name}"


def _call_data(call: ToolCallField) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": as_object(call.function.arguments or "{}")}
    return {"id": call.id, "type": call.type, "function": function}


def logprob_entry(logprob: gateway_pb2.Logprob) -> dict[str, Any]:
    top = [_token(each.token, each.logprob) for each in logprob.top]
    return {**_token(logprob.token, logprob.logprob), "top_logprobs": top}


def _token(token: gateway_pb2.TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.bytes)}
