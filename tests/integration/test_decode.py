"""Verifier and drafter over real gRPC, on emulated engines: the protocol, without the cost of a model."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from slipstream.engine.factory import open_engine
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import types_pb2, verifier_pb2
from tests.support.fleet import drafter, gateway, until, verifier

PROMPT = [7, 8, 9]


def target(settings: str = "") -> object:
    return open_engine(f"emulated:{settings}")


async def plain(prompt: list[int], tokens: int, **options: Any) -> list[int]:
    async with verifier(target()) as server, gateway(server.address) as client:
        return (await client.decode(prompt, tokens=tokens, **options)).token_ids


async def test_plain_decoding_is_a_round_with_no_candidates() -> None:
    async with verifier(target()) as server, gateway(server.address) as client:
        decoded = await client.decode(PROMPT, tokens=20)
    assert len(decoded.token_ids) == len(decoded.rounds) == 20
    assert decoded.drafted == 0
    assert decoded.end is not None and decoded.end.reason == verifier_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("acceptance", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("k", [1, 4, 16])
async def test_speculation_never_changes_a_token(acceptance: float, k: int) -> None:
    expected = await plain(PROMPT, 50)
    async with (
        drafter(target(f"acceptance={acceptance}")) as guesses,
        verifier(target("base_ms=25"), always_speculate=True) as server,  # so slow that candidates come in time
        gateway(server.address) as client,
    ):
        for _ in range(10):  # on a busy machine the first text may be over before the drafter is reached
            decoded = await client.decode(PROMPT, tokens=50, drafters=[guesses], max_draft_tokens=k)
            assert decoded.token_ids == expected
            if decoded.drafted:
                break
    assert decoded.drafted > 0
    assert max(round.drafted for round in decoded.rounds) <= k
    if acceptance == 1.0:
        assert decoded.accepted == decoded.drafted and len(decoded.rounds) < 50
    if acceptance == 0.0:
        assert decoded.accepted == 0


async def test_sessions_join_and_leave_between_steps() -> None:
    async with drafter(target("acceptance=0.8")) as guesses, verifier(target("base_ms=1")) as server:
        async with gateway(server.address) as client:
            prompts = [[seed, seed + 1] for seed in range(40)]
            runs = [client.decode(p, tokens=10 + i, drafters=[guesses]) for i, p in enumerate(prompts)]
            decoded = await asyncio.gather(*runs)
        for index, prompt in enumerate(prompts):
            assert decoded[index].token_ids == await plain(prompt, 10 + index)
        assert server.kv.blocks_free == server.kv.blocks_total


async def test_a_session_that_waited_for_hours_goes_on() -> None:
    """What its round says of the wait must fit the message; once it did not, and the verifier ended."""
    async with verifier(target()) as server, gateway(server.address) as client:
        number, decoded = await client.open(PROMPT, tokens=20, credit=5)
        await until(lambda: len(decoded.token_ids) == 5)
        for session in server.scheduler._sessions:
            session.idle_since -= 3 * 3600
        await client.command(number, credit=verifier_pb2.DecodeCredit(tokens=100))
        await until(decoded.done.is_set)
    assert len(decoded.token_ids) == 20 and decoded.rounds[5].wait_us == 2**32 - 1


async def test_the_first_round_reports_the_tokens_whose_kv_was_cached() -> None:
    prompt = list(range(100))
    async with verifier(target()) as server, gateway(server.address) as client:
        cached = [[done.cached_tokens for done in (await client.decode(prompt, tokens=5)).rounds] for _ in range(2)]
    assert cached[0] == [0] * 5
    assert 0 < cached[1][0] < 100 and cached[1][1:] == [0] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_no_stop_token_comes_before_the_least_length_whatever_is_proposed(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=5)
    free = await plain(PROMPT, 40, sampling=sampling)
    options = {"tokens": 40, "sampling": sampling, "stop": [free[2]]}
    texts = []
    async with (
        drafter(target("acceptance=0.9")) as guesses,
        verifier(target("base_ms=5")) as server,
        gateway(server.address) as client,
    ):
        assert len((await client.decode(PROMPT, **options)).token_ids) <= 3
        for drafters in ([], [guesses], [guesses]):
            least = len(PROMPT) + 20
            decoded = await client.decode(PROMPT, drafters=drafters, min_length=least, **options)
            texts.append(decoded.token_ids)
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) >= 20
    assert free[2] not in texts[0][:20] and free[:2] == texts[0][:2] and free[2] not in free[:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_no_bad_word_is_written_whatever_is_proposed(temperature: float) -> None:
    """Pairs of the free text, one after the other: the prefix of a word stands among the committed tokens as well as
    among the candidates."""
    bad, texts = list[tuple[int, ...]](), list[list[int]]()
    async with (
        drafter(target("acceptance=0.9")) as guesses,
        verifier(target("base_ms=5")) as server,
        gateway(server.address) as client,
    ):
        for _ in range(4):
            sampling = SamplingParams(temperature=temperature, seed=5, bad_words_ids=tuple(bad))
            options = {"tokens": 24, "sampling": sampling}
            texts = [
                (await client.decode(PROMPT, drafters=drafters, **options)).token_ids
                for drafters in ([], [guesses], [guesses])
            ]
            assert texts[0] == texts[1] == texts[2]
            assert not {*pairwise(texts[0])} & {*bad} and not {(token,) for token in texts[0]} & {*bad}
            bad += [(texts[0][3], texts[0][4]), (texts[0][8], texts[0][9]), (texts[0][12],)]


async def test_reasoning_ends_at_its_limit_whatever_is_proposed() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    limit = types_pb2.ReasoningLimit(max_tokens=6, begin_token_id=PROMPT[-1], end_token_id=77)
    async with (
        drafter(target("acceptance=0.9")) as guesses,
        verifier(target("base_ms=5")) as server,
        gateway(server.address) as client,
    ):
        free = (await client.decode(PROMPT, tokens=20, sampling=sampling)).token_ids
        texts = [
            (
                await client.decode(PROMPT, tokens=20, sampling=sampling, drafters=drafters, reasoning_limit=limit)
            ).token_ids
            for drafters in ([], [guesses], [guesses])
        ]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][:6] == free[:6] and texts[0][6] == 77 and 77 not in texts[0][:6]
