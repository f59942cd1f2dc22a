"""`slipstream serve` as a user of OpenAI's client meets it: the shipped pair, over HTTP."""

from __future__ import annotations

import openai

from benchmarks.prompts import held_out
from slipstream.client.client import complete
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2
from tests.e2e.conftest import serving_both


async def test_the_shipped_pair_gives_one_text_over_http_and_grpc_with_speculation_and_without() -> None:
    prompt = held_out(1, seed=4)[0]
    with serving_both("--dtype", "float32") as (grpc_address, http_address):
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
    assert made.choices[0].text == plain.choices[0].text == streamed == told.text != ""
    figures = made.metrics["speculative_decoding"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    assert not hasattr(plain, "metrics")
