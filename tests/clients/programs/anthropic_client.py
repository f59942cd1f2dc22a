"""Anthropic's SDK: python anthropic_client.py URL GUARDED KEY."""

import json
import sys

import anthropic

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
models = list(client.models.list())
model = models[0].id
assert models[0].display_name == model and client.models.retrieve(model).id == model
print("done models")

asked = {"model": model, "max_tokens": 12, "messages": [{"role": "user", "content": "Is 2 even?"}]}
answer = client.messages.create(**asked, system="Be brief.", extra_body={"seed": 7})
assert answer.content[0].type == "text" and answer.usage.output_tokens <= 12
print("done message")

with client.messages.stream(**asked, system="Be brief.", extra_body={"seed": 7}) as stream:
    text = "".join(stream.text_stream)
assert text == answer.content[0].text
print("done stream")

format = {"format": {"type": "json_schema", "schema": SCHEMA}}
held = client.messages.create(**asked | {"max_tokens": 60}, output_config=format)
assert isinstance(json.loads(held.content[0].text)["answer"], bool) and held.stop_reason == "end_turn"
print("done schema")

counted = client.messages.count_tokens(model=model, messages=asked["messages"], system="Be brief.")
assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
print("done count")

try:
    client.messages.create(**asked | {"model": "nothing"})
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
    print("done error")

keyed = anthropic.Anthropic(base_url=sys.argv[2], api_key=sys.argv[3], max_retries=0)
assert keyed.messages.create(**asked).content
try:
    anthropic.Anthropic(base_url=sys.argv[2], api_key="none", max_retries=0).messages.create(**asked)
except anthropic.AuthenticationError as error:
    assert error.body["error"]["type"] == "authentication_error"
    print("done key")
