"""Shapes in which other servers' clients send requests and read answers: numbers, names of models, hosts, traces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.api.http.entry import local_hosts
from gateway.config import GatewayConfig
from slipstream.client.gateway_endpoint import digest, new_key
from slipstream.errors import InvalidArgument, PermissionDenied
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks
from slipstream.v1 import types_pb2
from tests.integration.test_http_openai import Served
from tests.support.collector import Collector
from tests.support.http_client import events_of
from tests.support.scripted_gateway import Setting

SAID = [{"role": "user", "content": "Tell me."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
async def served(setting: Setting, tmp_path: Path) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        yield Served(setting, stack, tmp_path)


async def test_whole_numbers_may_be_written_with_a_point(served: Served) -> None:
    await served.start()
    asked = {"prompt": "Tell me.", "max_tokens": 3.0, "seed": 7.0, "top_k": 5.0, "n": 1.0, "model": None}
    answer = await served.web.post("/v1/completions", asked)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
    assert served.opened.sampling.seed == 7 and served.opened.sampling.top_k == 5
    refused = await served.web.post("/v1/completions", asked | {"max_tokens": 3.5})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


async def test_a_tool_without_a_type_is_a_function(served: Served) -> None:
    await served.start(template=False, chat_template=hermes(served))
    asked = {"messages": SAID, "max_tokens": 3, "tools": [{"function": {"name": "weather"}}]}
    assert (await served.web.post("/v1/chat/completions", asked)).status_code == 200
    assert "weather" in served.prompt()


def hermes(served: Served) -> str:
    path = served._template.with_name("tools.jinja")
    path.write_text("{# <tool_call> #}" + served._template.read_text())
    return str(path)


async def test_refusals_in_messages_reach_the_prompt_as_text(served: Served) -> None:
    await served.start()
    part = {"type": "refusal", "refusal": "I will not."}
    asked = {"role": "user", "content": "Tell me."}
    said = ({"content": None, "refusal": "I will not."}, {"content": [part]})
    for each in said:
        messages = [asked, {"role": "assistant", **each}, asked]
        assert (await served.web.post("/v1/chat/completions", {"messages": messages})).status_code == 200
        assert "I will not." in served._setting.tokenizer.decode(list(served.opened.prefix.token_ids))
    items = [asked, {"type": "message", "role": "assistant", "content": [part]}, asked]
    assert (await served.web.post("/v1/responses", {"input": items})).status_code == 200
    assert "I will not." in served._setting.tokenizer.decode(list(served.opened.prefix.token_ids))


async def test_a_response_from_a_prompt_that_is_kept_elsewhere_is_refused(served: Served) -> None:
    await served.start()
    refused = await served.web.post("/v1/responses", {"input": "Hi", "prompt": {"id": "pmpt_1"}})
    assert refused.status_code == 400 and "prompt is not served" in refused.json()["error"]["message"]


async def test_stop_strings_may_be_sentences(served: Served) -> None:
    await served.start("Hello. 私はその人を常に先生と呼んでいた。だからここでもただ先生と書く。And on.")
    stop = "私はその人を常に先生と呼んでいた。だからここでもただ先生と書く。"
    asked = {"prompt": "Tell me.", "max_tokens": 200, "stop": [stop]}
    choice = (await served.web.post("/v1/completions", asked)).json()["choices"][0]
    assert len(stop.encode()) > 64 and (choice["text"], choice["finish_reason"]) == ("Hello. ", "stop")


async def test_a_model_answers_to_its_aliases_too(served: Served) -> None:
    await served.start(model_aliases=("gpt-4o-mini", "small=toy"))
    listed = await served.openai.models.list()
    assert [model.id for model in listed.data] == ["toy", "gpt-4o-mini", "small"]
    assert (await served.openai.models.retrieve("small")).id == "small"
    for name in ("toy", "gpt-4o-mini", "small", ""):
        made = await served.openai.completions.create(model=name, prompt="Tell me.", max_tokens=3)
        assert made.model == "toy"
    with pytest.raises(openai.NotFoundError):
        await served.openai.completions.create(model="big", prompt="Tell me.")


@pytest.mark.parametrize("wrong", ["=toy", "a=", "="])
def test_an_alias_that_cannot_be_read_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match="GATEWAY_MODEL_ALIASES"):
        GatewayConfig(verifiers=("a:1",), tokenizer="none", model_aliases=("good", wrong))


async def test_probes_of_other_platforms_are_answered(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{digest(new_key()).hex()}" }}\n')
    await served.start(api_keys=str(file))
    for method in ("GET", "POST"):
        assert (await served.web.client.request(method, "/ping")).status_code == 200
    assert (await served.web.client.get("/load")).status_code == 401  # it shows what others do


async def test_load_counts_the_sessions(served: Served) -> None:
    await served.start(verifier={"limit": 4})
    assert (await served.web.client.get("/load")).json() == {"server_load": 0}
    asked = {"prompt": "Tell me.", "max_tokens": 30, "stream": True}
    async with served.web.client.stream("POST", "/v1/completions", json=asked) as response:
        async for _ in events_of(response):
            assert (await served.web.client.get("/load")).json() == {"server_load": 1}
            break


def test_a_host_of_a_container_or_proxy_is_let_in_by_its_name() -> None:
    hosts = local_hosts("127.0.0.1:8000", (), ("host.docker.internal", "llm.example:8443"))
    assert hosts is not None
    for name in ("host.docker.internal:8000", "HOST.docker.internal", "llm.example"):
        hosts.check(name)
    with pytest.raises(PermissionDenied, match="GATEWAY_HTTP_HOSTS"):
        hosts.check("other.example")
    assert local_hosts("127.0.0.1:8000", (), ("*",)) is None


async def test_anthropics_client_lists_models_with_its_own_header(served: Served, tmp_path: Path) -> None:
    import anthropic

    key = new_key()
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{digest(key).hex()}" }}\n')
    await served.start(api_keys=str(file))
    async with anthropic.AsyncAnthropic(base_url=served.web.url, api_key=key, max_retries=0) as client:
        models = [model async for model in client.models.list()]
        assert [(model.id, model.type, model.display_name) for model in models] == [("toy", "model", "toy")]
        assert (await client.models.retrieve("toy")).created_at.year == 1970


@pytest.mark.parametrize("beta", [False, True])
async def test_anthropics_format_holds_the_text(served: Served, beta: bool) -> None:
    await served.start()
    format = {"type": "json_schema", "schema": SCHEMA}
    more: dict[str, Any] = {"output_format": format} if beta else {"output_config": {"format": format}}
    answer = await served.web.post("/v1/messages", {"max_tokens": 3, "messages": SAID} | more)
    assert answer.status_code == 200, answer.text
    wanted = types_pb2.StructuredOutput(json_schema='{"type": "object", "properties"')
    assert served.opened.structured_output.json_schema.startswith(wanted.json_schema)
    wrong = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    refused = await served.web.post("/v1/messages", {"max_tokens": 3, "messages": SAID, "output_config": wrong})
    assert refused.status_code == 400


TRACED = [
    ("/v1/completions", {"prompt": "Tell me.", "max_tokens": 3}, "text_completion"),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 3}, "chat"),
    ("/v1/responses", {"input": "Tell me.", "max_output_tokens": 3}, "chat"),
    ("/v1/messages", {"messages": SAID, "max_tokens": 3}, "chat"),
]


@pytest.mark.parametrize(("path", "body", "operation"), TRACED)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_by_http_has_a_span_of_http(
    served: Served, collector: Collector, path: str, body: dict[str, Any], operation: str, stream: bool
) -> None:
    await served.start(tracing=collector.tracing("gateway", Clocks()))
    async with served.web.client.stream("POST", path, json=body | {"stream": stream}) as response:
        await response.aread()
    (span,) = [each for each in await collector.spans() if each.name == "generate"]
    assert response.headers["trace-id"] == span.trace and span.span.name == f"{operation} toy"
    found = {name: span.attributes.get(name) for name in (spans.HTTP_METHOD, spans.HTTP_ROUTE, spans.HTTP_STATUS)}
    assert found == {spans.HTTP_METHOD: "POST", spans.HTTP_ROUTE: path, spans.HTTP_STATUS: 200}
    assert span.attributes[spans.OPERATION] == operation and not {spans.METHOD, spans.STATUS} & set(span.attributes)


async def test_an_error_by_http_names_its_trace_and_status(served: Served, collector: Collector) -> None:
    await served.start(tracing=collector.tracing("gateway", Clocks()))
    answer = await served.web.post("/v1/completions", {"prompt": "Tell me.", "max_tokens": 3, "model": "nobody's"})
    (span,) = [each for each in await collector.spans() if each.name == "generate"]
    assert answer.status_code == span.attributes[spans.HTTP_STATUS] == 404
    assert answer.headers["trace-id"] == span.trace


async def test_a_conversation_by_grpc_is_a_chat_too(served: Served, collector: Collector) -> None:
    await served.start(tracing=collector.tracing("gateway", Clocks()))
    await served.web.front.generate(prompt="", chat={"messages": SAID}, max_tokens=3)
    (span,) = [each for each in await collector.spans() if each.name == "generate"]
    assert (span.attributes[spans.OPERATION], span.attributes[spans.STATUS]) == ("chat", "OK")
    assert span.attributes[spans.METHOD] == "slipstream.v1.GatewayService/Generate"


async def test_a_request_names_its_api_key_and_not_the_key_itself(
    served: Served, collector: Collector, tmp_path: Path
) -> None:
    key = new_key()
    (tmp_path / "keys.toml").write_text(f'acme = {{ sha256 = "{digest(key).hex()}" }}\n')
    await served.start(tracing=collector.tracing("gateway", Clocks()), api_keys=str(tmp_path / "keys.toml"))
    body, headers = {"prompt": "Tell me.", "max_tokens": 3}, {"authorization": f"Bearer {key}"}
    assert (await served.web.client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    (span,) = [each for each in await collector.spans() if each.name == "generate"]
    assert span.attributes[spans.TENANT] == "acme" and key not in str(span.attributes)
