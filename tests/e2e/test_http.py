"""`slipstream serve` as users of OpenAI's and Anthropic's clients meet it: the shipped pair, over HTTP."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from benchmarks.prompts import held_out
from slipstream.client.client import complete
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2
from tests.support.http_client import check_speculation


async def test_the_shipped_pair_gives_one_text_over_http_and_grpc_with_speculation_and_without(
    servers: tuple[str, str],
) -> None:
    prompt = held_out(1, seed=4)[0]
    grpc_address, http_address = servers
    async with channel(grpc_address) as line:
        sampling = gateway_pb2.SamplingOptions(temperature=0.7, seed=7)
        told = await complete(line, gateway_pb2.GenerateRequest(prompt=prompt, max_tokens=48, sampling=sampling))
    async with openai.AsyncOpenAI(base_url=f"http://{http_address}/v1", api_key="none") as client:
        (model,) = (await client.models.list()).data
        asked = {"model": model.id, "prompt": prompt, "max_tokens": 48, "temperature": 0.7, "seed": 7}
        made = await client.completions.create(**asked)  # type: ignore[call-overload]
        plain = await client.completions.create(**asked, extra_body={"speculation": {"disabled": True}})  # type: ignore[call-overload]
        stream = await client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        await _check_that_shared_prefixes_are_counted(client, http_address)
    assert made.choices[0].text == plain.choices[0].text == streamed == told.text != ""
    check_speculation(made.metrics)
    assert not hasattr(plain, "metrics")


async def _check_that_shared_prefixes_are_counted(client: openai.AsyncOpenAI, address: str) -> None:
    """A long prompt that comes again is found in the verifier's KV cache but for its last block, under its own salt."""
    import anthropic

    prompt, found = "".join(held_out(6, seed=5)), []
    messages: Any = [{"role": "user", "content": prompt}]
    for salt in ("one", "one", "two"):
        asked: Any = {"model": "", "max_tokens": 4, "extra_body": {"cache_salt": salt}}
        made = await client.completions.create(prompt=prompt, **asked)
        assert made.usage is not None and made.usage.prompt_tokens_details is not None
        found.append((made.usage.prompt_tokens, made.usage.prompt_tokens_details.cached_tokens))
    (tokens, first), (_, again), (_, salted) = found
    assert tokens > 100 and first == salted == 0 and tokens - 64 < again < tokens
    async with anthropic.AsyncAnthropic(base_url=f"http://{address}", api_key="none") as other:
        for salt, cached in (("one", False), ("one", True), ("two", False)):
            asked = {"model": "", "max_tokens": 4, "messages": messages, "extra_body": {"cache_salt": salt}}
            usage = (await other.messages.create(**asked)).usage
            total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
            assert total > tokens and (usage.input_tokens < 64) is cached


async def test_token_ids_log_probabilities_and_usage_end_where_a_stop_string_ends_the_text(
    servers: tuple[str, str],
) -> None:
    """Token ids, log-probabilities and usage are the same with candidates and without, whole and streamed."""
    prompt = held_out(1, seed=6)[0]
    async with openai.AsyncOpenAI(base_url=f"http://{servers[1]}/v1", api_key="none") as client:
        asked: Any = {"model": "", "prompt": prompt, "max_tokens": 48, "temperature": 0.7, "seed": 7, "logprobs": 1}
        extra = {"return_token_ids": True}
        text = (await client.completions.create(**asked, extra_body=extra)).choices[0].text
        for at in (5, 18, 30, 41):
            asked["stop"] = text[at : at + 6]
            found = []
            for more in (extra, extra | {"speculation": {"disabled": True}}):
                made = await client.completions.create(**asked, extra_body=more)
                (choice,), usage = made.choices, made.usage
                assert usage is not None and choice.logprobs is not None and choice.logprobs.tokens is not None
                found.append((choice.text, choice.model_extra["token_ids"], choice.logprobs.tokens))  # type: ignore[index]
                assert usage.completion_tokens == len(found[-1][1])
                chunks = [
                    chunk.choices[0]
                    async for chunk in await client.completions.create(**asked, stream=True, extra_body=more)
                    if chunk.choices
                ]
                ids = [token for chunk in chunks for token in chunk.model_extra["token_ids"]]
                names = [name for chunk in chunks if chunk.logprobs for name in chunk.logprobs.tokens or []]
                found.append(("".join(chunk.text for chunk in chunks), ids, names))
            assert all(each == found[0] for each in found) and found[0][0] == text[: text.index(asked["stop"])]
            assert len(found[0][1]) == len(found[0][2]) >= 1


async def test_a_response_that_is_read_again_has_its_log_probabilities_computed_again(servers: tuple[str, str]) -> None:
    include: Any = ["message.output_text.logprobs"]
    async with openai.AsyncOpenAI(base_url=f"http://{servers[1]}/v1", api_key="none") as client:
        asked: Any = {"model": "", "input": "def read(", "max_output_tokens": 20, "include": include, "top_logprobs": 2}
        made = await client.responses.create(**asked, temperature=0.8)
        again = await client.responses.retrieve(made.id, include=include)
        bare = await client.responses.retrieve(made.id)
        first, second, none = (each.output[0].content[0].logprobs for each in (made, again, bare))  # type: ignore[union-attr]
        assert made.usage is not None  # fewer than 20 tokens where the model drew the end of its text
        assert not none and len(first) == len(second) == made.usage.output_tokens > 0
        for one, other in zip(first, second, strict=True):
            assert one.token == other.token and abs(one.logprob - other.logprob) < 0.05
            assert len(other.top_logprobs) == 2
        assert again.output_text == made.output_text
        with pytest.raises(openai.BadRequestError, match="without stream"):
            await client.responses.retrieve(made.id, include=include, stream=True)
