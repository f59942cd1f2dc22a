"""A client believes only what follows from what it heard before."""

from __future__ import annotations

import socket

import pytest

from slipstream.client.client import RetrySettings
from slipstream.client.completion import Completion
from slipstream.errors import Unavailable
from slipstream.rpc.channel import channel
from slipstream.v1 import gateway_pb2, verifier_pb2
from tests.support.resumed_completion import resume

STARTED = gateway_pb2.GenerateResponse(started=gateway_pb2.Started(session_id="s"))


def delta(offset: int, *tokens: int, text: str = "", likely: bool = False) -> gateway_pb2.GenerateResponse:
    """A token's log-probability is less one for each place."""
    logprobs = [gateway_pb2.Logprob(logprob=-float(offset + index)) for index in range(len(tokens) if likely else 0)]
    said = gateway_pb2.Delta(offset=offset, token_ids=tokens, text=text, logprobs=logprobs)
    return gateway_pb2.GenerateResponse(delta=said)


def finished(output_tokens: int, **statistics: float) -> gateway_pb2.GenerateResponse:
    reason, told = verifier_pb2.FINISH_REASON_LENGTH, gateway_pb2.Statistics(**statistics)
    end = gateway_pb2.Finished(reason=reason, output_tokens=output_tokens, statistics=told)
    return gateway_pb2.GenerateResponse(finished=end)


def heard(*events: gateway_pb2.GenerateResponse, begins: int = 0) -> Completion:
    completion = Completion(begins=begins, token_ids=[0] * begins)
    for event in events:
        completion.take(event)
    return completion


def test_a_delta_that_comes_twice_counts_once() -> None:
    completion = heard(STARTED, delta(0, 5, 6, text="ab"), delta(0, 5, 6, text="ab"), delta(2, 7, text="c"))
    assert (completion.token_ids, completion.text) == ([5, 6, 7], "abc")


@pytest.mark.parametrize(
    "events",
    [[delta(0, 5)], [STARTED, delta(1, 6)], [STARTED, delta(0, 5), delta(2, 7)], [STARTED, delta(0, 5), finished(2)]],
    ids=["no beginning", "no first token", "a hole", "no last token"],
)
def test_a_gap_in_a_stream_is_detected_and_no_event_behind_it_is_taken(
    events: list[gateway_pb2.GenerateResponse],
) -> None:
    completion = heard(*events[:-1])
    before = list(completion.token_ids)
    with pytest.raises(Unavailable, match="is missing"):
        completion.take(events[-1])
    assert (completion.token_ids, completion.finished.reason) == (before, 0)


def test_tokens_behind_a_stop_string_are_cut() -> None:
    assert heard(STARTED, delta(0, 5, 6), finished(1)).token_ids == [5]


@pytest.mark.parametrize(
    ("begins", "events", "left"),
    [
        (0, [delta(0, 5, 6, 7, likely=True)], [0, -1]),
        (0, [delta(0, 5, likely=True), delta(1, 6, 7)], [0]),  # another gateway said those
        (0, [delta(0, 5), delta(1, 6), delta(2, 7, likely=True)], []),
        (1, [delta(1, 6, 7, likely=True)], [-1]),
    ],
)
def test_log_probabilities_are_cut_with_their_tokens(
    begins: int, events: list[gateway_pb2.GenerateResponse], left: list[int]
) -> None:
    completion = heard(STARTED, *events, finished(2), begins=begins)
    assert [told.logprob for told in completion.logprobs] == left
    assert completion.report()["token_ids"] == [5, 6][begins:]


def test_a_tokens_time_is_of_those_that_came_in_it() -> None:
    """Of a text of which another gateway said the rest before."""
    end = finished(9, emitted=3, ttft_s=1.0, e2e_s=2.0)
    assert heard(STARTED, delta(0, *range(9)), end).tpot_s == 0.5
    assert heard(STARTED, delta(0, *range(9)), finished(9, emitted=1, e2e_s=2.0)).tpot_s is None


async def test_a_text_that_breaks_off_ends_with_the_command_that_resumes_it() -> None:
    completion = heard(STARTED, delta(0, 5, 6, text="ab"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with channel(f"127.0.0.1:{nobody.getsockname()[1]}") as line:
            with pytest.raises(Unavailable, match="`slipstream resume s --offset 2`"):
                await resume([line], completion, RetrySettings(resume_s=0.0), Unavailable("gone."))
