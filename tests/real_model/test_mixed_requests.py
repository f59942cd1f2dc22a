"""Whatever requests meet in a step: each one's text, log-probabilities and end are those of plain decoding."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.errors import SlipstreamError
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2
from tests.real_model.fleet import DRAFTERS, Fleet
from tests.real_model.mixed_requests import mixed_request, plainly, speculating

AT_ONCE = 6
CLOSE = 1e-3
"""Log-probabilities of one token by passes of other shapes."""
Outcome = Completion | str
"""The reason of the typed error, for a request that cannot be served."""


async def outcome(line: grpc.aio.Channel, request: gateway_pb2.GenerateRequest) -> Outcome:
    try:
        return await complete(line, request)
    except SlipstreamError as error:
        assert error.reason
        return f"{type(error).__name__} {error.reason}"


def check_same(plain: Outcome, drafted: Outcome) -> None:
    if not isinstance(plain, Completion) or not isinstance(drafted, Completion):
        assert plain == drafted
        return
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
    assert (drafted.finished.reason, drafted.finished.stop) == (plain.finished.reason, plain.finished.stop)
    assert len(drafted.logprobs) == len(plain.logprobs)
    for ours, its in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.token.token_id == its.token.token_id
        assert [each.token.token_id for each in ours.top] == [each.token.token_id for each in its.top]
        for one, other in zip([ours, *ours.top], [its, *its.top], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [24, pytest.param(1500, marks=pytest.mark.slow)])
async def test_requests_of_all_kinds_at_once_have_the_outcome_of_plain_decoding(fleet: Fleet, count: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    async with channel(fleet.grpc) as line:

        async def pair(seed: int) -> tuple[int, int]:
            """Accepted candidates, and whether the request was served."""
            chance = random.Random(seed)
            asked = mixed_request(chance)
            async with gate:
                plain = await outcome(line, plainly(asked))
                text = plain.token_ids if isinstance(plain, Completion) else []
                drafted = await outcome(line, speculating(asked, text, DRAFTERS, chance))
            try:
                if not asked.sampling.acceptance:  # by the other rules candidates are part of the text
                    check_same(plain, drafted)
            except AssertionError as error:
                raise AssertionError(f"request of seed {seed}: {asked}") from error
            if not isinstance(drafted, Completion):
                return 0, 0
            return drafted.finished.statistics.accepted, 1

        async with asyncio.TaskGroup() as group:
            pairs = [group.create_task(pair(seed)) for seed in range(count)]
    accepted, served = map(sum, zip(*(each.result() for each in pairs), strict=True))
    assert accepted > count and served > 0.9 * count
