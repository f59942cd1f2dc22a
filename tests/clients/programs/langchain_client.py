"""LangChain: python langchain_client.py URL."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    even: bool


url = sys.argv[1]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="alias", max_retries=0, seed=7, max_tokens=60)
answer = chat.invoke("Is 2 even?")
assert answer.content and answer.usage_metadata["output_tokens"] <= 60
print("done chat")
assert "".join(chunk.content for chunk in chat.stream("Is 2 even?")) == answer.content
print("done stream")
found = chat.with_structured_output(Answer, method="json_schema").invoke("Is 2 even?")
assert isinstance(found.even, bool)
print("done structured")
plain = OpenAI(base_url=f"{url}/v1", api_key="none", model="alias", max_tokens=16, temperature=0, max_retries=0)
assert plain.invoke("def read(self, path):")
print("done completion")
other = ChatAnthropic(base_url=url, api_key="none", model="alias", max_tokens=12, max_retries=0)
assert other.invoke("Is 2 even?").content
print("done anthropic")
