"""OpenAI's SDK: python openai_client.py URL GUARDED KEY."""

import json
import sys
import time

import openai

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}
SAID = [{"role": "user", "content": "Is 2 even?"}]
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve("alias").id == "alias"
print("done models")

asked = {"model": model, "prompt": "def read(self, path):", "max_tokens": 16, "temperature": 0.0, "seed": 7}
made = client.completions.create(**asked)
assert made.choices[0].text and made.usage.completion_tokens == 16 and made.choices[0].finish_reason == "length"
streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
assert streamed == made.choices[0].text == client.completions.create(**asked | {"model": "alias"}).choices[0].text
print("done completion")

told = client.completions.create(**asked, logprobs=3).choices[0].logprobs
assert len(told.tokens) == len(told.token_logprobs) == 16 and all(len(each) >= 3 for each in told.top_logprobs)
stopped = {**asked, "logprobs": 1, "stop": [" se"]}  # it may begin at the end of a token: "\n            return self"
told = client.completions.create(**stopped).choices[0]
choices = [chunk.choices[0] for chunk in client.completions.create(**stopped, stream=True)]
assert "".join(choice.text for choice in choices) == told.text and told.finish_reason == "stop"
places = [place for choice in choices if choice.logprobs for place in choice.logprobs.text_offset]
assert places == told.logprobs.text_offset, places
print("done logprobs")

whole = client.completions.create(**asked | {"max_tokens": 0}, echo=True, logprobs=1).choices[0]
assert whole.text == asked["prompt"] and whole.logprobs.token_logprobs[0] is None
print("done echo")

bad = made.choices[0].text.split()[0]
without = client.completions.create(**asked, extra_body={"bad_words": [bad]}).choices[0].text
assert without != made.choices[0].text and not without.lstrip().startswith(bad)
print("done words")

chat = {"model": model, "messages": SAID, "max_completion_tokens": 12, "temperature": 0.0}
answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
assert answer.choices[0].message.content is not None and answer.choices[0].logprobs.content
print("done chat")

stream = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
chunks = list(stream)
said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert (
    said == answer.choices[0].message.content and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
)
print("done stream")

format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
parsed = client.chat.completions.create(**chat | {"max_completion_tokens": 60}, response_format=format)
assert parsed.choices[0].finish_reason == "stop" and parsed.choices[0].message.content.startswith("{")
print("done schema")

function = {"name": "look", "parameters": SCHEMA}
look = {"functions": [function], "function_call": {"name": "look"}, "max_completion_tokens": 60}
called = client.chat.completions.create(**chat | look).choices[0].message
assert called.function_call.name == "look" and not called.tool_calls
json.loads(called.function_call.arguments)
said = [*SAID, called.model_dump(exclude_none=True), {"role": "function", "name": "look", "content": "It is."}]
assert client.chat.completions.create(**chat | {"messages": said}, functions=[function]).choices
print("done functions")

told = client.responses.create(
    model=model, input="Is 2 even?", max_output_tokens=12, include=["message.output_text.logprobs"], temperature=0.0
)
assert told.output[0].content[0].logprobs and told.temperature == 0.0
again = client.responses.create(model=model, input="And 3?", max_output_tokens=12, previous_response_id=told.id)
assert client.responses.retrieve(again.id).output_text == again.output_text
print("done responses")

running = client.responses.create(model=model, input="Tell me of the sea.", max_output_tokens=40, background=True)
while (running := client.responses.retrieve(running.id)).status == "in_progress":
    time.sleep(0.05)
assert running.status in ("completed", "incomplete") and running.output
print("done background")

refer = [{"type": "item_reference", "id": told.output[0].id}, {"role": "user", "content": "Go on."}]
assert client.responses.create(model=model, input=refer, max_output_tokens=4).output
assert [item.type for item in client.responses.input_items.list(told.id)] == ["message"]
assert client.responses.input_tokens.count(model=model, input="Is 2 even?").input_tokens == told.usage.input_tokens
client.responses.delete(told.id)
print("done items")

failures = []
for call in (
    lambda: client.chat.completions.create(**chat | {"temperature": -1.0}),
    lambda: client.chat.completions.create(**chat | {"messages": [{"role": "user", "content": "even " * 20_000}]}),
    lambda: client.embeddings.create(model=model, input="Is 2 even?"),  # not served
):
    try:
        call()
    except openai.APIStatusError as error:
        failures.append((error.status_code, error.code))
assert failures == [(400, "number_out_of_range"), (400, "context_length_exceeded"), (404, "no_route")], failures
print("done error")

guarded = {"base_url": f"{sys.argv[2]}/v1", "max_retries": 0}
keyed = openai.OpenAI(**guarded, api_key=sys.argv[3])
assert keyed.chat.completions.create(**chat).choices[0].message.content == answer.choices[0].message.content
try:
    openai.OpenAI(**guarded, api_key="none").chat.completions.create(**chat)
except openai.AuthenticationError as error:
    assert error.code == "unauthenticated"
    print("done key")
