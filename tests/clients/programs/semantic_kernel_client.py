"""semantic-kernel: python semantic_kernel_client.py URL GUARDED KEY."""

import asyncio
import sys
from typing import Annotated

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent, FunctionResultContent
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import KernelArguments, kernel_function


class Answer(BaseModel):
    even: bool


class Numbers:
    called = 0

    @kernel_function(name="look", description="Looks whether a number is even.")
    def look(self, number: Annotated[int, "The number."], strict: bool) -> str:
        self.called += 1
        return f"{number} is {'even' if number % 2 == 0 else 'odd'}"


def service(url: str, key: str = "none") -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    return OpenAIChatCompletion(ai_model_id="alias", async_client=client)


def said(text: str = "Is 2 even?") -> ChatHistory:
    history = ChatHistory(system_message="Be brief.")
    history.add_user_message(text)
    return history


def settings(**more: object) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(**{"max_tokens": 60, "temperature": 0.0, "seed": 7, **more})


async def main(url: str, guarded: str, key: str) -> None:
    chat = service(url)
    answer = await chat.get_chat_message_content(said(), settings())
    assert answer.content and answer.metadata["usage"].completion_tokens <= 60
    print("done chat")

    pieces = [piece async for piece in chat.get_streaming_chat_message_content(said(), settings())]
    assert "".join(str(piece) for piece in pieces if piece) == answer.content
    print("done stream")

    held = await chat.get_chat_message_content(said(), settings(response_format=Answer))
    Answer.model_validate_json(held.content)
    print("done structured")

    kernel, numbers = Kernel(), Numbers()
    kernel.add_service(chat)
    kernel.add_plugin(numbers, "numbers")
    required = FunctionChoiceBehavior.Required(filters={"included_functions": ["numbers-look"]})
    required.maximum_auto_invoke_attempts = 1
    for stream in (False, True):
        history, given = said(), settings(function_choice_behavior=required)
        numbers.called = 0
        if stream:
            async for _ in chat.get_streaming_chat_message_content(history, given, kernel=kernel):
                pass
        else:
            assert (await chat.get_chat_message_content(history, given, kernel=kernel)).role == "assistant"
        kinds = [type(item) for message in history.messages[2:] for item in message.items if str(item)]
        assert numbers.called == 1 and kinds == [FunctionCallContent, FunctionResultContent], kinds
    auto = settings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    assert (await chat.get_chat_message_content(history, auto, kernel=kernel)).items
    print("done tools")

    prompt = "Is {{$number}} even?"
    invoked = await kernel.invoke_prompt(prompt, arguments=KernelArguments(settings(), number="2"))
    assert str(invoked)
    print("done prompt")

    agent = ChatCompletionAgent(service=chat, name="agent", instructions="Be brief.")
    thread = ChatHistoryAgentThread()
    given = KernelArguments(settings())
    first = await agent.get_response("Is 2 even?", thread=thread, arguments=given)
    text = ""
    async for piece in agent.invoke_stream("And 3?", thread=first.thread, arguments=given):
        text += str(piece.content)
    assert first.content.content and text and len([message async for message in thread.get_messages()]) == 4
    print("done agent")

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    plain = OpenAITextCompletion(ai_model_id="alias", async_client=client)
    short = OpenAITextPromptExecutionSettings(max_tokens=16, temperature=0.0)
    text = (await plain.get_text_content("def read(self, path):", short)).text
    pieces = [piece async for piece in plain.get_streaming_text_content("def read(self, path):", short)]
    assert text and "".join(piece.text for piece in pieces) == text
    print("done completion")

    stream = chat.get_streaming_chat_message_content(said(), settings(max_tokens=900, extra_body={"ignore_eos": True}))
    assert [await anext(stream) for _ in range(5)]
    await stream.aclose()
    print("done cancel")

    try:
        await chat.get_chat_message_content(said("even " * 20_000), settings())
    except ServiceResponseException as error:
        assert error.__cause__.code == "context_length_exceeded"
        print("done error")

    assert (await service(guarded, key).get_chat_message_content(said(), settings())).content
    try:
        await service(guarded).get_chat_message_content(said(), settings())
    except ServiceResponseException as error:
        assert error.__cause__.status_code == 401
        print("done key")


asyncio.run(main(*sys.argv[1:]))
