"""LiteLLM's proxy between OpenAI's SDK and the server: python litellm_proxy_client.py URL GUARDED KEY."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openai

url, guarded, key = sys.argv[1:]
MASTER = "sk-proxy"


def named(name: str, model: str, base: str, key: str = "none") -> dict[str, object]:
    return {"model_name": name, "litellm_params": {"model": model, "api_base": base, "api_key": key}}


MODELS = [
    named("chat", "openai/alias", f"{url}/v1"),
    named("hosted", "hosted_vllm/alias", f"{url}/v1"),
    named("plain", "text-completion-openai/alias", f"{url}/v1"),
    named("claude", "anthropic/alias", url),
    named("keyed", "openai/alias", f"{guarded}/v1", key),
    named("unkeyed", "openai/alias", f"{guarded}/v1"),
]
SCHEMA = {
    "type": "object",
    "properties": {"even": {"type": "boolean"}},
    "required": ["even"],
    "additionalProperties": False,
}
SAID = [{"role": "user", "content": "Is 2 even?"}]
asked = {"model": "chat", "messages": SAID, "max_tokens": 60, "temperature": 0.0, "seed": 7}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait(proxy: subprocess.Popen[bytes], address: str) -> None:
    while proxy.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    raise SystemExit("the proxy ended")


def load() -> int:
    """Sessions that run on the server."""
    with urllib.request.urlopen(f"{url}/load", timeout=30) as answer:
        return json.load(answer)["server_load"]


def refused(kind: type[openai.APIStatusError], **changes: object) -> str:
    """The sentence of an error of that kind."""
    try:
        list(proxied.chat.completions.create(**asked | changes))
    except kind as error:
        return str(error)
    raise SystemExit(f"{changes} was not refused")


def everything() -> None:
    direct = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert {model.id for model in proxied.models.list()} == {model["model_name"] for model in MODELS}
    print("done models")

    answer = proxied.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    said = direct.chat.completions.create(**asked | {"model": "alias"}).choices[0].message.content
    assert answer.message.content == said and len(answer.logprobs.content[0].top_logprobs) == 2
    hosted = asked | {"model": "hosted"}
    assert proxied.chat.completions.create(**hosted, extra_body={"top_k": 5}).choices[0].message.content == said
    print("done chat")

    options = {"stream": True, "stream_options": {"include_usage": True}}
    for model in ("chat", "hosted"):
        chunks = list(proxied.chat.completions.create(**asked | {"model": model}, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == said and chunks[-1].usage.completion_tokens <= 60
    print("done stream")

    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    forced = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    message = proxied.chat.completions.create(**asked, **forced).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "look" and isinstance(json.loads(call.function.arguments)["even"], bool)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is."}
    more = [*SAID, message.model_dump(exclude_none=True), result]
    assert proxied.chat.completions.create(**asked | {"messages": more}, tools=tools).choices
    chunks = list(proxied.chat.completions.create(**asked, **forced, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == json.loads(call.function.arguments)
    print("done tools")

    strict = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    for model in ("chat", "claude"):
        held = proxied.chat.completions.create(**asked | {"model": model, "seed": None}, response_format=strict)
        assert isinstance(json.loads(held.choices[0].message.content)["even"], bool)
    print("done structured")

    prompt = {"prompt": "def read(self, path):", "max_tokens": 16, "temperature": 0.0}
    text = proxied.completions.create(model="plain", **prompt).choices[0].text
    chunks = proxied.completions.create(model="plain", **prompt, stream=True)
    streamed = "".join(chunk.choices[0].text or "" for chunk in chunks)
    assert text == streamed == direct.completions.create(model="alias", **prompt).choices[0].text
    print("done completion")

    told = {"model": "chat", "input": "Is 2 even?", "max_output_tokens": 12, "temperature": 0.0}
    whole = proxied.responses.create(**told)
    events = list(proxied.responses.create(**told, stream=True))
    assert whole.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    print("done responses")

    said = proxied.chat.completions.create(**asked | {"model": "claude", "seed": None}).choices[0].message.content
    chunks = proxied.chat.completions.create(**asked | {"model": "claude", "seed": None}, stream=True)
    assert said == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    print("done anthropic")

    stream = proxied.chat.completions.create(
        **asked | {"max_tokens": 900}, stream=True, extra_body={"ignore_eos": True}
    )
    assert [next(stream) for _ in range(5)]
    stream.close()
    until = time.monotonic() + 30
    while load() and time.monotonic() < until:
        time.sleep(0.05)
    assert load() == 0
    print("done cancel")

    long = [{"role": "user", "content": "even " * 20_000}]
    for stream in (False, True):
        assert "maximum context length" in refused(openai.BadRequestError, messages=long, stream=stream)
    assert "temperature" in refused(openai.BadRequestError, temperature=-1.0)
    print("done error")

    assert proxied.chat.completions.create(**asked | {"model": "keyed"}).choices[0].message.content
    assert "authorization: Bearer KEY" in refused(openai.AuthenticationError, model="unkeyed")
    print("done key")


with tempfile.TemporaryDirectory() as folder:
    address = f"http://127.0.0.1:{free_port()}"
    config = Path(folder, "config.yaml")
    settings = {"num_retries": 0, "telemetry": False}
    config.write_text(json.dumps({"model_list": MODELS, "litellm_settings": settings}))  # JSON is YAML
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    environment = os.environ | {"LITELLM_MASTER_KEY": MASTER, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with subprocess.Popen(
        [*command, "--port", address.rpartition(":")[2], "--telemetry", "False"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as proxy:
        wait(proxy, address)
        proxied = openai.OpenAI(base_url=f"{address}/v1", api_key=MASTER, max_retries=0)
        try:
            everything()
        finally:
            proxy.terminate()
