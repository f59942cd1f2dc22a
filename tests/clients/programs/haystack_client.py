"""haystack: python haystack_client.py URL GUARDED KEY."""

import os
import sys

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
import openai
from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel

url = sys.argv[1]
common = {"model": "alias", "api_key": Secret.from_token("none"), "api_base_url": f"{url}/v1", "max_retries": 0}
settings = {"max_tokens": 60, "temperature": 0.0}
said = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("Is 2 even?")]


class Answer(BaseModel):
    even: bool


@tool
def look(even: bool) -> str:
    """Looks whether a number is even."""
    return f"even: {even}"


chat = OpenAIChatGenerator(**common, generation_kwargs=settings)
answer = chat.run(said)["replies"][0]
assert answer.text and answer.meta["usage"]["completion_tokens"] <= 60
print("done chat")

pieces = []
streamed = OpenAIChatGenerator(**common, generation_kwargs=settings, streaming_callback=pieces.append).run(said)
assert "".join(piece.content for piece in pieces) == answer.text == streamed["replies"][0].text
assert len(pieces) > 2 and pieces[-1].finish_reason in ("stop", "length")
print("done stream")

told = chat.run(said, generation_kwargs={"logprobs": True, "top_logprobs": 2, "n": 2})["replies"]
assert len(told) == 2 and all(len(each["top_logprobs"]) == 2 for each in told[0].meta["logprobs"]["content"])
print("done logprobs")

strict = {"name": "answer", "schema": Answer.model_json_schema() | {"additionalProperties": False}, "strict": True}
for stream, format in ((None, Answer), (pieces.append, {"type": "json_schema", "json_schema": strict})):
    held = chat.run(said, generation_kwargs={"response_format": format}, streaming_callback=stream)
    Answer.model_validate_json(held["replies"][0].text)
print("done structured")

forced = {"tool_choice": {"type": "function", "function": {"name": "look"}}}
for stream in (None, pieces.append):
    asked = chat.run(said, tools=[look], generation_kwargs=forced, streaming_callback=stream)["replies"][0]
    call = asked.tool_call
    assert call.tool_name == "look" and isinstance(call.arguments["even"], bool)
result = ChatMessage.from_tool(look.invoke(**call.arguments), origin=call)
assert chat.run([*said, asked, result], tools=[look])["replies"][0].text is not None
print("done tools")

caller = OpenAIChatGenerator(**common, generation_kwargs=settings | forced)
agent = Agent(chat_generator=caller, tools=[look], exit_conditions=["look"])
roles = [message.role.value for message in agent.run(messages=said)["messages"]]
assert roles == ["system", "user", "assistant", "tool"]
print("done agent")

pipeline = Pipeline()
pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("Is {{number}} even?")]))
pipeline.add_component("llm", OpenAIChatGenerator(**common, generation_kwargs=settings))
pipeline.connect("prompt", "llm")
assert pipeline.run({"prompt": {"number": 2}})["llm"]["replies"][0].text
print("done pipeline")

responses = OpenAIResponsesChatGenerator(**common, generation_kwargs={"max_output_tokens": 60, "temperature": 0.0})
told = responses.run(said)["replies"][0]
assert told.text == responses.run(said, streaming_callback=pieces.append)["replies"][0].text
held = responses.run(said, generation_kwargs={"text_format": Answer})["replies"][0]
Answer.model_validate_json(held.text)
named = {"tool_choice": {"type": "function", "name": "look"}}
asked = responses.run(said, tools=[look], generation_kwargs=named)["replies"][0]
result = ChatMessage.from_tool(look.invoke(**asked.tool_call.arguments), origin=asked.tool_call)
assert responses.run([*said, asked, result], tools=[look])["replies"][0].text is not None
print("done responses")

try:
    chat.run([ChatMessage.from_user("even " * 20_000)])
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
    print("done error")

guarded = {**common, "api_base_url": f"{sys.argv[2]}/v1", "generation_kwargs": settings}
assert OpenAIChatGenerator(**guarded | {"api_key": Secret.from_token(sys.argv[3])}).run(said)["replies"][0].text
try:
    OpenAIChatGenerator(**guarded).run(said)
except openai.AuthenticationError:
    print("done key")
