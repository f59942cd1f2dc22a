"""Admission: what a request leaves open is decided once, and the record can ask for exactly the same again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder
from tokenizers import models

from gateway.admission import Admission, Plan
from gateway.config import GatewayConfig
from gateway.routing import Router
from gateway.tokenizer import Tokenizer
from slipstream.errors import ResourceExhausted
from slipstream.v1 import gateway_pb2, types_pb2

CONFIG = GatewayConfig(verifiers=("x:1",), tokenizer="x", max_tokens_default=16, max_draft_tokens=6)
MODEL = types_pb2.ModelInfo(name="toy", vocabulary_size=50, max_length=100, eos_token_ids=[49, 48])


class OneModel(Router):
    def model(self, name: str) -> types_pb2.ModelInfo:
        return MODEL


async def plan(request: gateway_pb2.GenerateRequest, running: int = 0) -> Plan:
    encoder = Encoder(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    admission = Admission(CONFIG, OneModel(), Tokenizer(encoder, 1000), random.Random(1).getrandbits)
    return await admission.plan(request, running)


def request(**fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(prompt_token_ids=gateway_pb2.TokenIds(token_ids=[1, 2, 3]), **fields)


async def test_defaults_are_the_servers() -> None:
    made = await plan(request())
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.acceptance) == (1.0, 1.0, "coupled")
    assert (made.max_length, made.stop_token_ids, made.max_draft_tokens) == (19, (49, 48), 6)


@pytest.mark.parametrize(("asked", "given"), [(2, 2), (0, 0), (50, 6)])
async def test_a_request_may_ask_for_fewer_draft_tokens_but_not_for_more(asked: int, given: int) -> None:
    made = await plan(request(speculation=gateway_pb2.SpeculationOptions(max_draft_tokens=asked)))
    assert made.max_draft_tokens == given


async def test_above_the_limit_of_sessions_nothing_is_planned() -> None:
    with pytest.raises(ResourceExhausted):
        await plan(request(), running=CONFIG.max_sessions)


SAMPLINGS = st.builds(
    gateway_pb2.SamplingOptions,
    temperature=st.none() | st.floats(0, 100),
    top_k=st.none() | st.integers(0, 2**32 - 1),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0, 100, exclude_min=True),
    presence_penalty=st.none() | st.floats(-2, 2),
    frequency_penalty=st.none() | st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
SPECULATIONS = st.builds(
    gateway_pb2.SpeculationOptions, disabled=st.booleans(), max_draft_tokens=st.none() | st.integers(0, 100)
)


@given(
    sampling=SAMPLINGS,
    speculation=SPECULATIONS,
    max_tokens=st.none() | st.integers(1, 2**32 - 1),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 49), max_size=4),
    ignore_eos=st.booleans(),
)
async def test_the_record_asks_for_exactly_the_same_again(**fields: Any) -> None:
    made = await plan(request(**fields))
    again = gateway_pb2.GenerateRequest.FromString(made.params())
    again.prompt_token_ids.token_ids[:] = made.prompt
    assert await plan(again) == made
