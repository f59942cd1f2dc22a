"""LiteLLM: python litellm_client.py URL."""

import sys

import litellm

litellm.telemetry = False
url = sys.argv[1]
asked = {"messages": [{"role": "user", "content": "Is 2 even?"}], "api_key": "none", "max_tokens": 12, "seed": 7}
open_ai = {"model": "openai/alias", "base_url": f"{url}/v1"}
answer = litellm.completion(**asked, **open_ai).choices[0].message.content
assert answer
print("done chat")
assert (
    "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, **open_ai, stream=True))
    == answer
)
print("done stream")
text = litellm.text_completion(
    model="text-completion-openai/alias", prompt="def f(", api_base=f"{url}/v1", api_key="none", max_tokens=8
)
assert text.choices[0].text
print("done text")
told = litellm.responses(
    model="openai/alias", input="Is 2 even?", api_base=f"{url}/v1", api_key="none", max_output_tokens=8
)
assert told.output
print("done responses")
other = litellm.completion(**asked | {"seed": None}, model="anthropic/alias", api_base=url)
assert other.choices[0].message.content
print("done anthropic")
try:
    litellm.completion(**asked | {"messages": [{"role": "user", "content": "even " * 20_000}]}, **open_ai)
except litellm.ContextWindowExceededError:
    print("done error")
