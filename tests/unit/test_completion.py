"""A client believes only what follows from what it heard before."""

from __future__ import annotations

import socket

import pytest

from slipstream.client import channel
from slipstream.completion import Completion, Patience, resume
from slipstream.errors import Unavailable
from slipstream.v1 import gateway_pb2, verifier_pb2

STARTED = gateway_pb2.GenerateResponse(started=gateway_pb2.Started(session_id="s"))


def delta(offset: int, *tokens: int, text: str = "") -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(delta=gateway_pb2.Delta(offset=offset, token_ids=tokens, text=text))


def finished(output_tokens: int) -> gateway_pb2.GenerateResponse:
    reason = verifier_pb2.FINISH_REASON_LENGTH
    return gateway_pb2.GenerateResponse(finished=gateway_pb2.Finished(reason=reason, output_tokens=output_tokens))


def heard(*events: gateway_pb2.GenerateResponse) -> Completion:
    completion = Completion()
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
def test_what_is_missing_is_noticed_and_nothing_behind_it_is_taken(events: list[gateway_pb2.GenerateResponse]) -> None:
    completion = heard(*events[:-1])
    before = list(completion.token_ids)
    with pytest.raises(Unavailable, match="did not come"):
        completion.take(events[-1])
    assert (completion.token_ids, completion.finished.reason) == (before, 0)


def test_tokens_behind_a_stop_string_are_cut() -> None:
    assert heard(STARTED, delta(0, 5, 6), finished(1)).token_ids == [5]


async def test_a_text_that_breaks_off_says_how_to_go_on() -> None:
    completion = heard(STARTED, delta(0, 5, 6, text="ab"))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with channel(f"127.0.0.1:{nobody.getsockname()[1]}") as line:
            with pytest.raises(Unavailable, match="`slipstream resume s --offset 2`"):
                await resume([line], completion, None, Patience(resume_s=0.0), Unavailable("gone."))
