"""LlamaIndex's OpenAILike: python llama_index_client.py URL GUARDED KEY."""

import asyncio
import sys

import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

url = sys.argv[1]
common = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0.0, "max_retries": 0, "context_window": 1024}
chat = OpenAILike(
    model="alias",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    max_tokens=60,
    logprobs=True,
    top_logprobs=2,
    **common,
)
said = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Is 2 even?")]


class Answer(BaseModel):
    """Whether a number is even."""

    even: bool


def look(even: bool) -> str:
    """Looks whether a number is even."""
    return f"even: {even}"


answer = chat.chat(said)
assert answer.message.content and answer.raw.usage.completion_tokens <= 60
assert len(answer.logprobs) == answer.raw.usage.completion_tokens and len(answer.logprobs[0]) == 2
print("done chat")

assert "".join(piece.delta or "" for piece in chat.stream_chat(said)) == answer.message.content
print("done stream")

plain = OpenAILike(model="alias", is_chat_model=False, max_tokens=16, **common)
text = plain.complete("def read(self, path):").text
assert text and "".join(piece.delta for piece in plain.stream_complete("def read(self, path):")) == text
print("done completion")

assert isinstance(chat.as_structured_llm(Answer).chat(said).raw.even, bool)
print("done structured")

tool = FunctionTool.from_defaults(look)
asked = chat.chat_with_tools([tool], chat_history=said, tool_required=True)
call = chat.get_tool_calls_from_response(asked)[0]
assert call.tool_name == "look" and isinstance(call.tool_kwargs["even"], bool)
result = ChatMessage(
    role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
)
assert chat.chat_with_tools([tool], chat_history=[*said, asked.message, result]).message.blocks
*_, last = chat.stream_chat_with_tools([tool], chat_history=said, tool_required=True)
assert chat.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
print("done tools")


async def agent() -> None:
    found = await FunctionAgent(llm=chat, tools=[tool], system_prompt="Be brief.").run("Is 2 even?")
    assert found.response.role == "assistant"
    print("done agent")


asyncio.run(agent())

responses = OpenAILikeResponses(model="alias", max_output_tokens=12, **common)
told = responses.chat(said).message.content
assert told and "".join(piece.delta or "" for piece in responses.stream_chat(said)) == told
print("done responses")

long = OpenAILike(model="alias", is_chat_model=True, additional_kwargs={"extra_body": {"ignore_eos": True}}, **common)
pieces = long.stream_chat(said)
assert [next(pieces).delta is not None for _ in range(5)]
pieces.close()
print("done cancel")

try:
    chat.chat([ChatMessage(role="user", content="even " * 20_000)])
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
    print("done error")

guarded = {**common, "api_base": f"{sys.argv[2]}/v1", "is_chat_model": True, "max_tokens": 8}
assert OpenAILike(model="alias", **guarded | {"api_key": sys.argv[3]}).chat(said).message.content
try:
    OpenAILike(model="alias", **guarded).chat(said)
except openai.AuthenticationError as error:
    assert error.code == "unauthenticated"
    print("done key")
