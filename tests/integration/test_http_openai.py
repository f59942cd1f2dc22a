"""The OpenAI API over real HTTP, by the client library that its users have, before a scripted verifier."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.errors import ResourceExhausted
from slipstream.tokenizer.structured_output import OPTIONS_KEY, whitespace_options
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.integration.test_gateway_logprobs import likely
from tests.support.http_client import CHAT_TEMPLATE, SPECULATION_KEYS, Web, check_speculation, web
from tests.support.scripted_gateway import TEXT, Setting
from tests.support.sdk_clients import openai_client


class Served:
    """A gateway with a chat template, its HTTP API, and OpenAI's client of it."""

    def __init__(self, setting: Setting, stack: AsyncExitStack, folder: Path) -> None:
        self._setting = setting
        self._stack = stack
        self._template = folder / "chat.jinja"
        self._template.write_text(CHAT_TEMPLATE)

    async def start(self, text: str = TEXT, template: bool = True, **options: Any) -> Served:
        self.verifier = self._setting.verifier(text, **options.pop("verifier", {}))
        chat = {"chat_template": str(self._template)} if template else {}
        self.web: Web = await web(self._setting, self._stack, self.verifier, **chat, **options)
        client = openai_client(self.web.url)
        self.openai = await self._stack.enter_async_context(client)
        return self

    def shorten(self, tokens: int) -> int:
        """The length that verifiers announce from now on, as those whose KV memory is smaller than their model's."""
        self._setting.model.max_length -= tokens
        return int(self._setting.model.max_length)

    @property
    def opened(self) -> verifier_pb2.DecodeOpen:
        return self.verifier.opens()[-1]

    def text(self, tokens: int) -> str:
        return str(self._setting.tokenizer.decode(self.verifier.script[:tokens]))

    def encoded(self, text: str) -> list[int]:
        return list(self._setting.tokenizer.encode(text).ids)

    def prompt(self, opened: verifier_pb2.DecodeOpen | None = None) -> str:
        return str(self._setting.tokenizer.decode(list((opened or self.opened).prefix.token_ids)))


@pytest.fixture
async def served(setting: Setting, tmp_path: Path) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        yield Served(setting, stack, tmp_path)


async def test_a_completion_is_the_text_that_grpc_gives(served: Served) -> None:
    await served.start()
    made = await served.openai.completions.create(model="toy", prompt="Tell me.", max_tokens=40, seed=3)
    told = await served.web.front.generate(max_tokens=40)
    assert made.choices[0].text == told.text and made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (8, 40, 48)
    assert made.id == f"cmpl-{(await served.web.front.record(made.id[5:])).key.id}" and made.model == "toy"
    assert served.verifier.opens()[0].sampling.seed == 3


@pytest.mark.parametrize(("cap", "completion"), [(0, 16), (40, 40)])
async def test_without_a_number_a_chat_has_the_rest_of_the_context_and_a_completion_16_tokens(
    served: Served, cap: int, completion: int
) -> None:
    await served.start(max_tokens_default=cap)
    await served.openai.completions.create(model="toy", prompt="Tell me.")
    opened = [served.opened]
    await served.openai.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Tell me."}])
    opened.append(served.opened)
    await served.openai.responses.create(model="toy", input="Tell me.")
    opened.append(served.opened)
    await served.web.front.stub.Generate(gateway_pb2.GenerateRequest(prompt="Tell me.")).read()
    opened.append(served.opened)
    room = [each.max_length - len(each.prefix.token_ids) for each in opened]
    assert room[0] == completion
    assert [each.max_length for each in opened[1:]] == [200] * 3 if cap == 0 else room[1:] == [cap] * 3


async def test_a_prompt_that_no_verifiers_memory_holds_is_the_clients_to_shorten(served: Served) -> None:
    smaller = served.shorten(90)
    await served.start()
    with pytest.raises(openai.BadRequestError) as refused:
        await served.openai.completions.create(model="toy", prompt="Tell me. " * 16)
    assert refused.value.code == "context_length_exceeded"
    await served.openai.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Tell me."}])
    assert served.opened.max_length == smaller


SCORED = {"prompt": "Tell me.", "echo": True, "logprobs": 2, "max_tokens": 3}


def check_echo(choice: Any, output: int) -> None:
    """The prompt's eight tokens of one byte, as the scripted verifier scores them, and so many of the output."""
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:8] == list("Tell me.")
    assert logprobs["token_logprobs"][:8] == [None, *(-float(place) for place in range(1, 8))]
    assert logprobs["top_logprobs"][0] is None and logprobs["top_logprobs"][1] == {"b": 0.0, "c": -0.5, "e": -1.0}
    assert logprobs["text_offset"][:8] == list(range(8))
    assert [len(logprobs[name]) for name in logprobs] == [8 + output] * 4


async def test_echo_with_logprobs_gives_the_prompts_too(served: Served) -> None:
    await served.start(verifier={"mangle": likely})
    (choice,) = (await served.web.post("/v1/completions", SCORED)).json()["choices"]
    assert choice["text"] == "Tell me." + served.text(3)
    check_echo(choice, output=3)
    events = await served.web.events("/v1/completions", SCORED | {"stream": True})
    joined = made_of([event.json for event in events[:-1]], 0)
    assert joined == {name: choice[name] for name in joined}


def made_of(chunks: list[Any], index: int) -> dict[str, Any]:
    """The choice that the chunks of a stream make."""
    parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
    names = parts[0]["logprobs"]
    return {
        "text": "".join(part["text"] for part in parts),
        "logprobs": {name: [each for part in parts for each in part["logprobs"][name]] for name in names},
        "finish_reason": parts[-1]["finish_reason"],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_answers_with_the_prompt_alone(served: Served, stream: bool) -> None:
    """What a likelihood is asked for with: no token of the output is sent or counted."""
    await served.start(verifier={"mangle": likely})
    asked = SCORED | {"max_tokens": 0, "prompt": [served.encoded("Tell me."), served.encoded("Told me.")]}
    if not stream:
        made = (await served.web.post("/v1/completions", asked)).json()
        choices, usage = made["choices"], made["usage"]
    else:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = [event.json for event in (await served.web.events("/v1/completions", asked | more))[:-1]]
        choices, usage = [made_of(chunks, index) for index in range(2)], last["usage"]
    assert [choice["text"] for choice in choices] == ["Tell me.", "Told me."]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
    check_echo(choices[0], output=0)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (16, 0)


async def test_prompt_logprobs_are_as_vllm_has_them(served: Served) -> None:
    await served.start()
    asked = {"prompt": "Tell me.", "max_tokens": 2, "prompt_logprobs": 1}
    (choice,) = (await served.web.post("/v1/completions", asked)).json()["choices"]
    first, second, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 6 and choice["logprobs"] is None
    assert second == {
        str(served.encoded("e")[0]): {"logprob": -1.0, "rank": None, "decoded_token": "e"},
        str(served.encoded("b")[0]): {"logprob": 0.0, "rank": 1, "decoded_token": "b"},
    }
    assert served.opened.prompt_logprobs == 1
    (bare,) = (await served.web.post("/v1/completions", {"prompt": "Tell me.", "max_tokens": 2})).json()["choices"]
    assert "prompt_logprobs" not in bare and not served.opened.HasField("prompt_logprobs")


async def test_a_stream_joins_to_the_whole_text_and_ends_with_usage_where_it_is_asked_for(served: Served) -> None:
    await served.start()
    body = {"prompt": "Tell me.", "max_tokens": 30, "stream": True}
    plain = await served.web.events("/v1/completions", body)
    assert plain[-1].data == "[DONE]" and not any(event.id or event.name for event in plain)
    chunks = [event.json for event in plain[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == served.text(30)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert not any("usage" in chunk for chunk in chunks)
    asked = await served.web.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    *chunks, last = [event.json for event in asked[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 30
    check_speculation(last["metrics"])


async def test_the_figures_of_speculation_agree_with_each_other(served: Served) -> None:
    await served.start()
    made = (await served.web.post("/v1/completions", {"prompt": "Tell me.", "max_tokens": 40})).json()
    figures, details = check_speculation(made["metrics"]), made["usage"]["completion_tokens_details"]
    accepted = figures["num_accepted_draft_tokens"]
    assert details["accepted_prediction_tokens"] == accepted
    assert details["rejected_prediction_tokens"] == figures["num_draft_tokens"] - accepted
    told = {"prompt": "Tell me.", "max_tokens": 40, "speculation": {"rounds": True}}
    detailed = (await served.web.post("/v1/completions", told)).json()["metrics"]["speculative_decoding"]
    assert set(detailed) == SPECULATION_KEYS | {"per_step_accepted", "per_step_drafted"}
    per_step = detailed["per_step_accepted"], detailed["per_step_drafted"]
    assert [len(each) for each in per_step] == [detailed["num_spec_steps"]] * 2
    assert sum(per_step[0]) == detailed["num_accepted_draft_tokens"]
    assert sum(per_step[1]) == detailed["num_draft_tokens"]
    assert [per_step[0].count(length) for length in range(detailed["num_spec_tokens"] + 1)] == (
        detailed["acceptance_histogram"]
    )
    typical = {"prompt": "Tell me.", "max_tokens": 4, "speculation": {"acceptance": "typical"}}
    lossy = (await served.web.post("/v1/completions", typical)).json()["metrics"]["speculative_decoding"]
    assert lossy["lossy"] is True and set(lossy) == SPECULATION_KEYS | {"lossy"}
    assert served.opened.sampling.acceptance == types_pb2.ACCEPTANCE_RULE_TYPICAL
    plain = {"prompt": "Tell me.", "max_tokens": 4, "speculation": {"disabled": True}}
    assert "metrics" not in (await served.web.post("/v1/completions", plain)).json()


async def test_prompts_as_texts_and_token_ids_give_their_choices_in_order(served: Served) -> None:
    await served.start()
    tokens = served._setting.tokenizer.encode("Tell me.").ids
    for prompt, prompts in (
        ("Tell me.", 1),
        (["Tell me.", "And me?"], 2),
        (tokens, 1),
        ([tokens, tokens, tokens], 3),
    ):
        made = await served.openai.completions.create(model="toy", prompt=prompt, n=2, seed=5, max_tokens=6)
        assert [choice.index for choice in made.choices] == list(range(2 * prompts))
        assert {choice.text for choice in made.choices} == {served.text(6)}
        assert made.usage is not None and made.usage.completion_tokens == 12 * prompts
        opened = served.verifier.opens()[-2 * prompts :]
        assert sorted(each.sampling.seed for each in opened) == [5] * prompts + [6] * prompts


async def test_every_field_of_sampling_reaches_the_verifier(served: Served) -> None:
    await served.start()
    await served.web.post(
        "/v1/completions",
        {
            "prompt": "Tell me.",
            "max_tokens": 20,
            "temperature": 0.5,
            "top_p": 0.75,
            "top_k": 7,
            "min_p": 0.25,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"65": 2.0},
            "allowed_token_ids": [65, 66, 200],
            "bad_words": ["ab"],
            "seed": -1,
            "stop_token_ids": [200],
            "ignore_eos": True,
            "min_tokens": 11,
            "cache_salt": "s",
            "workload": "code",
            "priority": 4,
            "speculation": {"max_draft_tokens": 2, "acceptance": "coupled"},
        },
    )
    opened = served.opened
    assert opened.sampling == types_pb2.SamplingOptions(
        temperature=0.5,
        top_k=7,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={65: 2.0},
        allowed_token_ids=[65, 66, 200],
        bad_words_ids=[{"token_ids": [64, 65]}, {"token_ids": [220, 64, 65]}],
        seed=2**64 - 1,
        acceptance=types_pb2.ACCEPTANCE_RULE_COUPLED,
    )
    assert list(opened.stop_token_ids) == [200] and opened.cache_salt == "s" and opened.workload == "code"
    assert opened.min_length == 8 + 11
    assert opened.priority == 4 and opened.policy.max_draft_tokens == 2


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ({"response_format": {"type": "text"}}, types_pb2.StructuredOutput()),
        ({"response_format": {"type": "json_object"}}, types_pb2.StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            types_pb2.StructuredOutput(json_schema='{"type": "null"}'),
        ),
        (
            {"structured_outputs": {"json": {"type": "null"}}},
            types_pb2.StructuredOutput(json_schema='{"type": "null"}'),
        ),
        ({"structured_outputs": {"regex": "[ab]+"}}, types_pb2.StructuredOutput(regex="[ab]+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, types_pb2.StructuredOutput(grammar='start: "a"')),
        ({"structured_outputs": {"choice": ["a", "b"]}}, types_pb2.StructuredOutput(grammar='start: "a" | "b"')),
        ({"structured_outputs": {"json_object": True}}, types_pb2.StructuredOutput(json_schema='{"type": "object"}')),
        (
            {"structured_outputs": {"json": '{"type": "null"}', "whitespace_pattern": "[ ]?"}},
            types_pb2.StructuredOutput(
                json_schema=json.dumps({OPTIONS_KEY: whitespace_options("[ ]?"), "type": "null"})
            ),
        ),
    ],
)
async def test_a_format_of_the_output_reaches_the_verifier(served: Served, field: Any, wanted: Any) -> None:
    await served.start()
    made = await served.web.post("/v1/completions", {"prompt": "Tell me.", "max_tokens": 5} | field)
    assert made.status_code == 200, made.text
    assert served.opened.structured_output == wanted


async def test_a_prediction_is_guessed_from_and_changes_nothing(served: Served) -> None:
    await served.start()
    for content in ("One day", [{"type": "text", "text": "One "}, {"type": "text", "text": "day"}]):
        prediction = {"type": "content", "content": content}
        made = await served.web.post(
            "/v1/completions", {"prompt": "Tell me.", "max_tokens": 9, "prediction": prediction}
        )
        assert made.json()["choices"][0]["text"] == served.text(9)
        assert list(served.opened.prediction_token_ids) == served._setting.tokenizer.encode("One day").ids


async def test_usage_counts_the_tokens_of_each_prompt_that_no_choice_had_to_compute(served: Served) -> None:
    begun: set[int] = set()
    found: list[int] = []

    def first_found(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        if done.session not in begun:
            begun.add(done.session)
            done.cached_tokens = found.pop()
        return [done]

    await served.start(verifier={"mangle": first_found})
    for cached, more, total in (
        ([5], {}, 5),
        ([0, 6], {"n": 2}, 0),
        ([5, 6], {"n": 2}, 5),
        ([5, 3], {"prompt": ["Tell me.", "And me?"]}, 8),
        ([99], {}, 8),
    ):
        found += cached
        asked: Any = {"model": "toy", "prompt": "Tell me.", "max_tokens": 9} | more
        made = await served.openai.completions.create(**asked)
        assert made.usage is not None and made.usage.prompt_tokens_details is not None
        assert made.usage.prompt_tokens_details.cached_tokens == total
    found.append(4)
    answered = await served.openai.responses.create(model="toy", input="x", max_output_tokens=9)
    assert answered.usage is not None and answered.usage.input_tokens_details.cached_tokens == 4


async def test_a_stop_string_ends_the_text_and_is_named(served: Served) -> None:
    await served.start()
    made = await served.openai.completions.create(model="toy", prompt="Tell me.", max_tokens=40, stop=["Käse", "zz"])
    choice = made.choices[0]
    assert choice.text == TEXT[: TEXT.index("Käse")] and choice.finish_reason == "stop"
    assert (choice.model_extra or {})["stop_reason"] == "Käse"


async def test_echo_and_token_ids(served: Served) -> None:
    await served.start()
    asked = {"prompt": "Tell me.", "max_tokens": 6, "echo": True, "return_token_ids": True}
    choice = (await served.web.post("/v1/completions", asked)).json()["choices"][0]
    assert choice["text"] == "Tell me." + served.text(6)
    assert choice["token_ids"] == served.verifier.script[:6] and len(choice["prompt_token_ids"]) == 8
    events = await served.web.events("/v1/completions", asked | {"stream": True})
    chunks = [event.json["choices"][0] for event in events[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]


async def test_logprobs_have_the_shape_of_each_route(served: Served) -> None:
    def with_logprobs(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        for token in done.token_ids:
            each = types_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[token, 66], top_logprobs=[-0.5, -float("inf")])
            done.logprobs.append(each)
        return [done]

    await served.start("Hello, world", verifier={"mangle": with_logprobs})
    made = await served.openai.completions.create(model="toy", prompt="Tell me.", max_tokens=3, logprobs=2)
    found = made.choices[0].logprobs
    assert found is not None and found.tokens == ["H", "e", "l"] and found.token_logprobs == [-0.5] * 3
    assert found.text_offset == [0, 1, 2] and found.top_logprobs is not None
    assert found.top_logprobs[0]["H"] == -0.5 and min(found.top_logprobs[0].values()) == -9999.0
    chat = await served.openai.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content is not None and [each.token for each in content] == ["H", "e", "l"]
    assert content[0].bytes == [72] and content[0].top_logprobs[0].token == "H"


async def test_a_chat_is_written_by_the_template_and_answered(served: Served) -> None:
    await served.start()
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]},
    ]
    made = await served.openai.chat.completions.create(model="toy", messages=messages, max_completion_tokens=20)
    assert served.prompt() == "<system>Be brief.\n<user>Hello\nthere\n<assistant>"
    assert made.choices[0].message.content == served.text(20) and made.choices[0].finish_reason == "length"
    assert made.id.startswith("chatcmpl-")
    stream = await served.openai.chat.completions.create(
        model="toy", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    content = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(content) == served.text(20)
    begun: Any = [*messages, {"role": "assistant", "content": "Well"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    await served.openai.chat.completions.create(model="toy", messages=begun, max_tokens=2, extra_body=more)
    assert served.prompt() == "<system>Be brief.\n<user>Hello\nthere\n<assistant>Well"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 20 and not chunks[-1].choices


async def test_a_model_without_a_template_is_refused_with_the_flag_that_sets_one(served: Served) -> None:
    await served.start(template=False)
    with pytest.raises(openai.BadRequestError, match=r"slipstream serve --chat-template chatml"):
        await served.openai.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hi"}])


async def test_errors_have_openais_body_status_and_request_id(served: Served) -> None:
    await served.start()
    with pytest.raises(openai.NotFoundError) as missing:
        await served.openai.completions.create(model="other", prompt="Tell me.")
    assert missing.value.code == "no_model" and missing.value.type == "not_found_error" and missing.value.request_id
    with pytest.raises(openai.BadRequestError) as wrong:
        await served.openai.completions.create(model="toy", prompt="Tell me.", temperature=-3)
    assert "temperature" in wrong.value.message
    with pytest.raises(openai.BadRequestError) as typed:
        await served.openai.completions.create(model="toy", prompt="Tell me.", max_tokens="many")  # type: ignore[call-overload]
    assert typed.value.param == "max_tokens"
    answer = await served.web.post("/v1/completions", {"prompt": ""}, **{"x-request-id": "mine"})
    assert answer.status_code == 400 and answer.headers["x-request-id"] == "mine"
    assert answer.json()["error"]["code"] == "empty_prompt"


async def test_a_temporary_refusal_has_a_retry_delay_and_the_client_retries(served: Served) -> None:
    await served.start(rehomings=0)
    served.verifier.refuse = ResourceExhausted("there is no room.", reason="KV_FULL")
    answer = await served.web.post("/v1/completions", {"prompt": "Tell me."})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    retrying = served.openai.with_options(max_retries=5)
    call = asyncio.create_task(retrying.completions.create(model="toy", prompt="Tell me.", max_tokens=5))
    await served.verifier.until(lambda: len(served.verifier.opens()) > 2)
    served.verifier.refuse = None
    assert (await call).choices[0].text == served.text(5)


async def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_client(served: Served) -> None:
    await served.start(verifier={"limit": 9})
    stream = await served.openai.completions.create(model="toy", prompt="Tell me.", max_tokens=40, stream=True)
    first = await anext(aiter(stream))
    await served.web.front.roll_back(first.id.removeprefix("cmpl-"), 1)
    with pytest.raises(openai.APIError, match="rolled back"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_the_verifier(served: Served, streaming: bool) -> None:
    await served.start(verifier={"limit": 9})
    body = {"prompt": "Tell me.", "max_tokens": 100, "stream": streaming, "n": 2}
    call = asyncio.create_task(served.web.events("/v1/completions", body))
    async with asyncio.timeout(60):
        await served.verifier.until(lambda: sum(session.output for session in served.verifier.sessions.values()) == 18)
        call.cancel()
        await served.verifier.until(lambda: not served.verifier.sessions)


async def test_choices_are_admitted_together_or_not_at_all(served: Served) -> None:
    await served.start(max_sessions=2, verifier={"limit": 9})
    answer = await served.web.post("/v1/completions", {"prompt": "Tell me.", "n": 3, "stream": True})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "sessions"
    async with asyncio.timeout(60):
        await served.verifier.until(lambda: not served.verifier.sessions)


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("guided_json", {"type": "object"}, None),
        ("guided_choice", ["a"], []),
        ("echo", True, False),
        ("add_special_tokens", True, False),
        ("include_reasoning", False, True),
        ("return_tokens_as_token_ids", True, False),
        ("regex", "a+", None),
        ("ebnf", 'root ::= "a"', None),
        ("repeat_penalty", 1.2, 1.0),
        ("conversation", "conv_1", None),
        ("length_penalty", 1.2, 1.0),
        ("use_beam_search", True, False),
        ("prompt_logprobs", 3, None),
        ("modalities", ["text", "audio"], ["text"]),
    ],
)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(
    served: Served, name: str, value: Any, harmless: Any
) -> None:
    await served.start()
    chat = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 3, "model": None}
    refused = await served.web.post("/v1/chat/completions", chat | {name: value})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "field_not_served")
    assert name in refused.json()["error"]["message"]
    assert not served.verifier.sessions
    assert (await served.web.post("/v1/chat/completions", chat | {name: harmless})).status_code == 200


async def test_a_completion_without_special_tokens_is_refused_and_with_them_is_what_happens(served: Served) -> None:
    await served.start()
    asked = {"prompt": "Tell me.", "max_tokens": 3}
    refused = await served.web.post("/v1/completions", asked | {"add_special_tokens": False})
    assert refused.json()["error"]["code"] == "field_not_served"
    assert (await served.web.post("/v1/completions", asked | {"add_special_tokens": True})).status_code == 200


async def test_bad_words_are_forbidden_as_they_are_spelled_at_a_beginning_and_behind_a_space(served: Served) -> None:
    await served.start()
    encode = served._setting.tokenizer.encode
    asked = {"prompt": "Tell me.", "max_tokens": 3, "bad_words": ["Ärö", " so", "so"]}
    assert (await served.web.post("/v1/completions", asked)).status_code == 200
    wanted = [encode(each).ids for each in ("Ärö", " Ärö", "so", " so")]
    assert [list(each.token_ids) for each in served.opened.sampling.bad_words_ids] == wanted


async def test_lm_evals_remote_tokenizer_finds_what_it_asks_for(served: Served) -> None:
    await served.start()
    info = (await served.web.client.get("/tokenizer_info")).json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast" and "<{{ message.role }}>" in info["chat_template"]
    counted = await served.web.post("/tokenize", {"prompt": "Ärö", "add_special_tokens": False})
    assert (await served.web.post("/detokenize", {"tokens": counted.json()["tokens"]})).json()["prompt"] == "Ärö"


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_a_misspelt_speculation_option_is_refused_with_the_valid_ones(served: Served, route: str) -> None:
    """`{"disable": true}` speculated on."""
    await served.start()
    prompt = {"prompt": "a"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    asked = {"model": "toy", "max_tokens": 3, **prompt}
    refused = await served.web.post(route, asked | {"speculation": {"disabled" + "d" * 99: True}})
    said = refused.json()["error"]["message"]
    assert refused.status_code == 400 and said.startswith("speculation.disabled") and len(said) < 200
    assert "speculation has acceptance, disabled, drafters, max_draft_tokens, rounds." in said
    assert (await served.web.post(route, asked | {"speculation": {"disabled": True}})).status_code == 200


async def test_unknown_fields_are_logged_once_and_ignored(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    await served.start()
    with caplog.at_level(logging.INFO, "gateway"):
        for _ in range(2):
            asked = {"prompt": "Tell me.", "max_tokens": 3, "never_heard_of": "a secret", "a secret name!": 1}
            assert (await served.web.post("/v1/completions", asked)).status_code == 200
    assert caplog.text.count("never_heard_of") == 1 and "secret" not in caplog.text


@pytest.mark.parametrize(
    "field",
    [
        {"suffix": "end"},
        {"best_of": 3},
        {"n": 0},
        {"n": 129},
        {"prompt": []},
        {"prompt": ["a"] * 129},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1_0": 1}},
        {"logit_bias": {"٣": 1}},
        {"logit_bias": {" 3": 1}},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [10_000]},
        {"allowed_token_ids": [65], "response_format": {"type": "json_object"}},
        {"speculation": {"acceptance": "nonsense"}},
        {"speculation": {"drafters": ["nobody"]}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "json": "{}"}},
        {"structured_outputs": {"json_object": True, "json": "{}"}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a"], "grammar": 'start: "a"'}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"structured_outputs": {"json": "{", "whitespace_pattern": " "}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"stop": [""]},
        {"min_tokens": 4},
        {"min_tokens": 1, "response_format": {"type": "json_object"}},
        {"top_p": 0},
    ],
)
async def test_fields_and_values_that_are_not_served_are_refused(served: Served, field: Any) -> None:
    await served.start()
    answer = await served.web.post("/v1/completions", {"prompt": "Tell me.", "max_tokens": 3} | field)
    assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
    assert not served.verifier.opens()


async def test_models_and_the_tokenizer(served: Served) -> None:
    await served.start()
    models = await served.openai.models.list()
    assert [model.id for model in models.data] == ["toy"]
    assert (await served.openai.models.retrieve("toy")).id == "toy"
    with pytest.raises(openai.NotFoundError):
        await served.openai.models.retrieve("other/model")
    text = "One day — der Käse 日本"
    split = (await served.web.post("/tokenize", {"prompt": text})).json()
    assert split["tokens"] == served._setting.tokenizer.encode(text).ids and split["count"] == len(split["tokens"])
    assert (await served.web.post("/detokenize", {"tokens": split["tokens"]})).json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}
    assert "".join((await served.web.post("/tokenize", chat)).json()["token_strs"]) == "<user>Hi\n<assistant>"
    assert (await served.web.post("/detokenize", {"tokens": [2**31]})).status_code == 400


async def test_the_root_leads_browsers_to_the_page_and_answers_health_checks(served: Served) -> None:
    await served.start()
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    led = await served.web.client.get("/", headers=browser, follow_redirects=False)
    assert (led.status_code, led.headers["location"]) == (307, "/playground")
    for headers in ({"accept": "*/*", "user-agent": "ELB-HealthChecker/2.0"}, {"user-agent": "GoogleHC/1.0"}):
        checked = await served.web.client.get("/", headers=headers, follow_redirects=False)
        assert checked.status_code == 200 and "/ready" in checked.text


async def test_health_version_metrics_and_docs_are_served(served: Served) -> None:
    await served.start()
    get = served.web.client.get
    assert (await get("/health")).json() == {"status": "ok"} and (await get("/ready")).status_code == 200
    assert (await get("/version")).json()["version"]
    assert "slipstream_rounds_total" in (await get("/metrics")).text
    schema = (await get("/openapi.json")).json()
    assert "/v1/chat/completions" in schema["paths"] and "/v1/chat/completions" in (await get("/docs")).text
    assert (await get("/nothing")).json()["error"]["type"] == "not_found_error"
    assert (await get("/v1/completions")).status_code == 405


async def test_a_request_over_http_is_seen_by_grpc(served: Served) -> None:
    await served.start()
    made = (await served.web.post("/v1/completions", {"prompt": "Tell me.", "max_tokens": 12})).json()
    record = await served.web.front.record(made["id"].removeprefix("cmpl-"))
    assert list(record.output_token_ids) == served.verifier.script[:12]
    assert record.finish_reason == verifier_pb2.FINISH_REASON_LENGTH
    assert isinstance(record, gateway_pb2.GetSessionResponse)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_prompt_that_is_too_long_has_openais_code_and_sentence(served: Served, chat: bool) -> None:
    """LangChain, LiteLLM and aider look for one or the other."""
    await served.start()
    asked: Any = {"model": "toy", "max_tokens": 5}
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        if chat:
            messages: Any = [{"role": "user", "content": "Tell me. " * 2000}]
            await served.openai.chat.completions.create(**asked, messages=messages)
        else:
            await served.openai.completions.create(**asked, prompt="Tell me. " * 2000)
    assert refused.value.code == "context_length_exceeded" and refused.value.type == "invalid_request_error"
