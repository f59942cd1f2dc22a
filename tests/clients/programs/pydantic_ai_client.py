"""pydantic-ai: python pydantic_ai_client.py URL."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    even: bool


url = sys.argv[1]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
chat = OpenAIChatModel("alias", provider=provider)
settings = {"max_tokens": 60, "seed": 7, "temperature": 0.0}


async def main() -> None:
    agent = Agent(chat, model_settings=settings)
    answer = await agent.run("Is 2 even?")
    assert answer.output
    print("done text")
    async with agent.run_stream("Is 2 even?") as stream:
        assert await stream.get_output() == answer.output
    print("done stream")
    held = await Agent(chat, output_type=NativeOutput(Answer), model_settings=settings).run("Is 2 even?")
    assert isinstance(held.output.even, bool)
    print("done output")
    told = await Agent(OpenAIResponsesModel("alias", provider=provider), model_settings={"max_tokens": 16}).run("Hi")
    assert told.output
    print("done responses")
    other = AnthropicModel("alias", provider=AnthropicProvider(base_url=url, api_key="none"))
    assert (await Agent(other, model_settings={"max_tokens": 16}).run("Hi")).output
    print("done anthropic")


asyncio.run(main())
