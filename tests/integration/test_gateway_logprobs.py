"""Log-probabilities on their way from a scripted verifier to a client, over real gRPC."""

from __future__ import annotations

import pytest

from slipstream.client.completion import Completion
from slipstream.errors import (
    Unavailable,
)
from slipstream.v1 import verifier_pb2
from tests.support.scripted_gateway import Setting


def likely(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
    """The i-th token of the text has log-probability -i, and token 65 is always the likeliest."""
    for index in range(len(done.token_ids)):
        told = done.logprobs.add(logprob=-float(done.base_length + index))
        told.top_token_ids.extend([65, done.token_ids[index]])
        told.top_logprobs.extend([0.0, told.logprob])
    return [done]


async def test_log_probabilities_come_with_their_tokens_and_words(setting: Setting) -> None:
    front = await setting.front(setting.verifier(mangle=likely))
    answer = await front.generate(logprobs=True, top_logprobs=2)
    (opened,) = front.verifiers[0].opens()
    assert opened.top_logprobs == 2
    start = len(answer.started.prompt_token_ids)
    assert [one.token.token_id for one in answer.logprobs] == answer.tokens
    assert [one.logprob for one in answer.logprobs] == [-float(start + index) for index in range(40)]
    assert b"".join(one.token.bytes for one in answer.logprobs).decode(errors="replace") == answer.text
    assert {one.top[0].token.token_id for one in answer.logprobs} == {65}
    assert answer.logprobs[0].token.text == "O" and answer.logprobs[0].top[1].token.text == "O"
    assert (await front.generate(logprobs=True)).logprobs[0].logprob == -float(start)


async def test_log_probabilities_of_a_special_token_have_its_name_and_no_bytes(setting: Setting) -> None:
    front = await setting.front(setting.verifier([66, setting.eos], mangle=likely))
    end = (await front.generate(logprobs=True)).logprobs[-1].token
    assert (end.token_id, end.text, end.bytes) == (setting.eos, "<eos>", b"")


@pytest.mark.parametrize("per_round", [1, 3, 17])
async def test_a_stop_string_cuts_log_probabilities_with_their_tokens(setting: Setting, per_round: int) -> None:
    front = await setting.front(setting.verifier(per_round=per_round, mangle=likely))
    completion = Completion()
    async for event in front.call(stop=["lief 🚀"], max_tokens=60, logprobs=True):
        completion.take(event)
    assert 0 < len(completion.token_ids) == completion.finished.output_tokens == len(completion.logprobs)
    assert [one.token.token_id for one in completion.logprobs] == completion.token_ids


async def test_rounds_without_the_log_probabilities_that_were_asked_for_cost_a_rehoming(setting: Setting) -> None:
    def lazy(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        return likely(done) if done.epoch > 1 or done.base_length < 20 else [done]

    front = await setting.front(setting.verifier(mangle=lazy))
    answer = await front.generate(logprobs=True)
    assert answer.finished.statistics.rehomed == 1
    assert [one.token.token_id for one in answer.logprobs] == answer.tokens == front.verifiers[0].script[:40]
    with pytest.raises(Unavailable):  # nor are they sent to who did not ask
        await (await setting.front(setting.verifier(mangle=likely))).generate()
