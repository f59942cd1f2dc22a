"""A prediction drafter over real gRPC: it guesses what it is told to expect, and believes nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running
from slipstream.engine.factory import open_engine
from slipstream.rpc.channel import channel
from tests.integration.test_drafter_protocol import CODE, PROMPT, Speaker
from tests.support.fleet import until

TARGET = open_engine("emulated:").model
EXPECTED = [11, 12, 13, 14, 15, 16, 17, 18]


@asynccontextmanager
async def speaking() -> AsyncIterator[Speaker]:
    config = DrafterConfig(method="prediction", listen="127.0.0.1:0", grace_s=0.0)
    async with running(config) as drafter, channel(drafter.address) as line:
        speaker = Speaker(line)
        try:
            yield speaker
        finally:
            await speaker.close()


async def test_the_prediction_is_drafted_at_once_and_followed_through_an_edit() -> None:
    async with speaking() as speaker:
        await speaker.open(1, prediction_token_ids=EXPECTED)
        await until(lambda: speaker.tokens(1) == EXPECTED)
        await speaker.commit(1, len(PROMPT), [11, 12, 99])  # 99 is new, the rest goes on
        await speaker.commit(1, len(PROMPT) + 3, [13])
        text = [*PROMPT, 11, 12, 99, 13]  # a drafter that is early guesses the 13, or that 99 stands for it
        await until(lambda: [*text, 14, 15, 16, 17, 18] in speaker.texts(1, text))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prediction_token_ids": [1, TARGET.vocabulary_size]},
        {"prediction_token_ids": [1] * (TARGET.max_length + 1)},
        {"cache_salt": "x" * 65},
    ],
)
async def test_hints_that_no_correct_verifier_sends_cost_their_session_alone(wrong: dict[str, object]) -> None:
    async with speaking() as speaker:
        await speaker.open(1, **wrong)
        assert CODE[(await speaker.refused(1)).code] is grpc.StatusCode.INVALID_ARGUMENT
        await speaker.open(2, prediction_token_ids=EXPECTED)
        await until(lambda: speaker.tokens(2) == EXPECTED)
