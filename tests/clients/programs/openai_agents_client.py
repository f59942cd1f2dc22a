"""OpenAI's Agents SDK, on chat completions and on responses: python openai_agents_client.py URL GUARDED KEY."""

import asyncio
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)
url, guarded, key = sys.argv[1:]
client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
settings = ModelSettings(max_tokens=60, temperature=0.0, include_usage=True)
# To this client a response that the length cuts off is an error: what the model says has to end.
short = settings.resolve(ModelSettings(extra_body={"structured_outputs": {"regex": "[A-Za-z ]{1,20}[.]"}}))
called = []


class Answer(BaseModel):
    even: bool


@function_tool
def look(number: int, strict: bool) -> str:
    """Looks whether a number is even."""
    called.append(number)
    return f"{number} is {'even' if number % 2 == 0 else 'odd'}"


async def everything(model: OpenAIChatCompletionsModel | OpenAIResponsesModel, kind: str) -> None:
    plain = Agent("plain", "Be brief.", model=model, model_settings=short)
    answer = await Runner.run(plain, "Is 2 even?")
    used = answer.context_wrapper.usage
    assert answer.final_output and 0 < used.output_tokens <= 60
    print(f"done {kind}-text")

    result = Runner.run_streamed(plain, "Is 2 even?")
    text = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    assert text == answer.final_output == result.final_output
    assert result.context_wrapper.usage.output_tokens == used.output_tokens
    print(f"done {kind}-stream")

    held = await Runner.run(Agent("held", model=model, model_settings=settings, output_type=Answer), "Is 2 even?")
    assert isinstance(held.final_output.even, bool)
    print(f"done {kind}-output")

    forced = short.resolve(ModelSettings(tool_choice="look"))
    for stream in (False, True):
        called.clear()
        agent = Agent("caller", model=model, model_settings=forced, tools=[look])
        if stream:
            run = Runner.run_streamed(agent, "Is 2 even?", max_turns=2)
            kinds = [event.item.type async for event in run.stream_events() if event.type == "run_item_stream_event"]
        else:
            run = await Runner.run(agent, "Is 2 even?", max_turns=2)
            kinds = [item.type for item in run.new_items]
        assert len(called) == 1 and run.final_output, kinds
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
    print(f"done {kind}-tools")

    other = Agent("other", "Be kind.", model=model, model_settings=short)
    hand = short.resolve(ModelSettings(tool_choice="transfer_to_other"))
    first = Agent("first", model=model, model_settings=hand, handoffs=[other])
    moved = await Runner.run(first, "Is 2 even?", max_turns=2)
    assert moved.last_agent is other and moved.final_output
    print(f"done {kind}-handoff")

    session = SQLiteSession(kind)
    await Runner.run(plain, "Is 2 even?", session=session)
    again = await Runner.run(plain, "And 3?", session=session)
    assert again.final_output and len(await session.get_items()) == 4
    print(f"done {kind}-session")

    long = Agent("long", model=model, model_settings=ModelSettings(extra_body={"ignore_eos": True}))
    running, seen = Runner.run_streamed(long, "Tell me of the sea."), 0
    async for event in running.stream_events():
        seen += event.type == "raw_response_event"
        if seen == 5:
            running.cancel()
    assert running.is_complete and running.final_output is None
    print(f"done {kind}-cancel")

    try:
        await Runner.run(plain, "even " * 20_000)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded" and "maximum context length" in str(error)
        print(f"done {kind}-error")


async def main() -> None:
    await everything(OpenAIChatCompletionsModel("alias", client), "chat")
    await everything(OpenAIResponsesModel("alias", client), "responses")
    model = OpenAIResponsesModel("alias", client)
    plain = Agent("plain", model=model, model_settings=short)
    answer = await Runner.run(plain, "Is 2 even?")
    more = await Runner.run(plain, "And 3?", previous_response_id=answer.last_response_id)
    assert more.final_output
    print("done previous")

    opened = openai.AsyncOpenAI(base_url=f"{guarded}/v1", api_key=key, max_retries=0)
    agent = Agent("keyed", model=OpenAIResponsesModel("alias", opened), model_settings=short)
    assert (await Runner.run(agent, "Is 2 even?")).final_output
    closed = openai.AsyncOpenAI(base_url=f"{guarded}/v1", api_key="none", max_retries=0)
    try:
        await Runner.run(agent.clone(model=OpenAIResponsesModel("alias", closed)), "Is 2 even?")
    except openai.AuthenticationError:
        print("done key")


asyncio.run(main())
