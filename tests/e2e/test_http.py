"""`slipstream serve` as users of OpenAI's and Anthropic's clients meet it: the shipped pair, over HTTP."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from benchmarks.prompts import held_out
from slipstream.client.client import complete
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2
from tests.web import check_speculation


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
