"""A session on a verifier believes only what can follow from what it received before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.clock import VirtualLoop, run
from gateway.routing.verifier_session import SessionEnded, VerifierSession, stream_lost
from slipstream.errors import Internal, ResourceExhausted, Unavailable
from slipstream.v1 import types_pb2, verifier_pb2


class Wire:
    """What was said to the verifier; refuses everything once it is down."""

    def __init__(self) -> None:
        self.said: list[verifier_pb2.DecodeCommand] = []
        self.down = False

    def send(self, command: verifier_pb2.DecodeCommand) -> None:
        if self.down:
            raise Unavailable("down")
        self.said.append(command)


def opened(*, epoch: int = 1, credit: int = 100, max_length: int = 50) -> tuple[VerifierSession, Wire]:
    wire = Wire()
    session = VerifierSession(7, wire.send, vocabulary_size=100)
    session.open(
        verifier_pb2.DecodeOpen(
            key=types_pb2.SessionKey(id="s", epoch=epoch),
            prefix=types_pb2.Prefix(token_ids=[1, 2, 3], prompt_length=3),
            max_length=max_length,
            credit=credit,
        )
    )
    return session, wire


def done(base: int, *tokens: int, epoch: int = 1, **counts: Any) -> verifier_pb2.Round:
    return verifier_pb2.Round(session=7, epoch=epoch, base_length=base, token_ids=tokens, **counts)


def share(drafted: int, accepted: int) -> verifier_pb2.DrafterShare:
    return verifier_pb2.DrafterShare(drafter="one", drafted=drafted, accepted=accepted)


async def tokens_of(session: VerifierSession) -> list[int]:
    received = await session.take_received()
    return [token for heard in received.rounds for token in heard.token_ids]


async def test_rounds_are_taken_once_and_in_order() -> None:
    session, _ = opened()
    session.receive_round(done(3, 10, 11))
    session.receive_round(done(5, 12))
    assert await tokens_of(session) == [10, 11, 12]
    waiting = asyncio.create_task(tokens_of(session))
    await asyncio.sleep(0)
    assert not waiting.done()
    session.receive_round(done(6, 13))
    assert await waiting == [13]


async def test_late_and_repeated_rounds_are_dropped() -> None:
    session, _ = opened(epoch=2)
    for stale in (done(3, 9, epoch=1), done(2, 9, epoch=2)):
        session.receive_round(stale)
    session.receive_round(done(3, 10, epoch=2))
    session.receive_round(done(3, 10, epoch=2))
    received = await session.take_received()
    assert ([list(heard.token_ids) for heard in received.rounds], received.end) == ([[10]], None)


@pytest.mark.parametrize(
    "wrong",
    [
        done(4, 9),
        done(3, 9, epoch=2),
        done(3, 100),
        done(3, *[1] * 48),
        done(3, 9, drafted=1, accepted=2),
        done(3, 9, drafted=1 << 31),
        done(3, 9, drafted=2, drafters=[share(1, 2)]),
    ],
    ids=["gap", "epoch", "token", "long", "accepted", "drafted", "of a drafter"],
)
async def test_a_round_that_cannot_be_right_ends_the_session(wrong: verifier_pb2.Round) -> None:
    session, _ = opened()
    session.receive_round(wrong)
    session.receive_round(done(3, 10))
    received = await session.take_received()
    assert received.rounds == []
    assert received.end is not None and isinstance(received.end.error, Unavailable)


async def test_a_round_may_overdraw_the_credit_but_none_may_follow() -> None:
    session, _ = opened(credit=2)
    session.receive_round(done(3, 10, 11, 12))
    session.add_credit(1)
    session.receive_round(done(6, 13))
    received = await session.take_received()
    assert len(received.rounds) == 1 and received.end is not None


async def test_rounds_before_an_end_are_received_and_the_first_end_stays() -> None:
    session, _ = opened()
    session.receive_round(done(3, 10))
    session.receive_end(verifier_pb2.SessionEnd(session=7, epoch=1, reason=verifier_pb2.FINISH_REASON_STOP))
    session.end(stream_lost(Unavailable("later"), 1.0))
    first, second = await session.take_received(), await session.take_received()
    assert len(first.rounds) == 1
    assert first.end == second.end == SessionEnded(verifier_pb2.FINISH_REASON_STOP)


async def test_an_end_of_an_earlier_epoch_is_not_this_sessions() -> None:
    session, _ = opened(epoch=2)
    session.receive_end(verifier_pb2.SessionEnd(session=7, epoch=1, reason=verifier_pb2.FINISH_REASON_STOP))
    session.receive_round(done(3, 10, epoch=2))
    assert (await session.take_received()).end is None


async def test_failures_keep_their_code_and_an_unasked_close_is_unavailable() -> None:
    session, _ = opened()
    failure = types_pb2.Failure(code=8, message="no room", reason="KV")
    session.receive_end(
        verifier_pb2.SessionEnd(session=7, epoch=1, reason=verifier_pb2.FINISH_REASON_ERROR, failure=failure)
    )
    end = (await session.take_received()).end
    assert end is not None and isinstance(end.error, ResourceExhausted) and end.error.reason == "KV"
    session, _ = opened()
    session.receive_end(verifier_pb2.SessionEnd(session=7, epoch=1, reason=verifier_pb2.FINISH_REASON_CANCELLED))
    end = (await session.take_received()).end
    assert end is not None and isinstance(end.error, Unavailable)


@pytest.mark.parametrize(("steps", "credit", "ends"), [("none", 9, True), ("some", 9, False), ("none", 0, False)])
def test_a_verifier_that_takes_no_steps_while_it_could_is_stuck(steps: str, credit: int, ends: bool) -> None:
    """Control: one that works for others, or waits for the client, is not."""

    async def main() -> None:
        session, _ = opened(credit=credit)
        clock = asyncio.get_running_loop().time
        listening = asyncio.create_task(
            session.receive_until_stalled(lambda: int(clock()) if steps == "some" else 7, stall_s=6.0)
        )
        await asyncio.sleep(5.9)
        assert not listening.done()
        await asyncio.sleep(0.2)
        assert listening.done() == ends
        if not ends:
            await asyncio.sleep(60.0)
            session.receive_round(done(3, 10)) if credit else session.end(
                SessionEnded(verifier_pb2.FINISH_REASON_ERROR)
            )
        received = await listening
        error = received.end.error if received.end is not None else None
        assert (error is not None and error.reason == "STUCK") == ends

    run(main())


@pytest.mark.parametrize("before_s", [0.5, 3.0, 5.4])
def test_a_gateway_that_was_suspended_itself_takes_no_verifier_for_stalled(before_s: float) -> None:
    async def main() -> None:
        session, _ = opened()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        listening = asyncio.create_task(session.receive_until_stalled(lambda: 7, stall_s=6.0))
        await asyncio.sleep(before_s)
        loop.now += 600.0
        await asyncio.sleep(0.3)
        session.receive_round(done(3, 10))
        assert (await listening).end is None

    run(main())


def test_commands_carry_the_sessions_number_and_epoch() -> None:
    session, wire = opened(credit=20)
    session.add_credit(20)
    session.close()
    assert [(command.session, command.epoch) for command in wire.said] == [(7, 1), (7, 1), (7, 1)]
    assert [command.WhichOneof("command") for command in wire.said] == ["open", "credit", "close"]


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60),
)
def test_a_verifier_whose_client_takes_all_is_never_short_of_credit(credit: int, rounds: list[tuple[int, int]]) -> None:
    """Credit is sent in parts; rounds generate `made` tokens, of which a client takes some, at last all."""
    session, wire = opened(credit=credit, max_length=10**6)
    at, lag = 3, 0
    for made, taken in [*rounds, (1, 10**6)]:
        if made and not session.out_of_credit:
            session.receive_round(done(at, *[1] * made))
            at, lag = at + made, lag + made
        session.add_credit(min(taken, lag))
        lag -= min(taken, lag)
        sent = sum(command.credit.tokens for command in wire.said if command.WhichOneof("command") == "credit")
        assert sent <= at - 3 - lag, "no credit for what no client took"
        if not lag:
            assert credit + sent - (at - 3) > credit / 2
    received = asyncio.run(session.take_received())
    assert received.end is None and sum(len(each.token_ids) for each in received.rounds) == at - 3


def test_a_client_that_takes_single_tokens_causes_few_messages() -> None:
    session, wire = opened(credit=512, max_length=10**6)
    for at in range(1024):
        session.receive_round(done(3 + at, 1))
        session.add_credit(1)
    assert [command.credit.tokens for command in wire.said[1:]] == [128] * 8


def test_commands_to_a_lost_verifier_are_dropped_but_opening_a_session_fails() -> None:
    session, wire = opened()
    wire.down = True
    session.add_credit(1)
    session.close()
    with pytest.raises(Unavailable):
        VerifierSession(8, wire.send, 100).open(verifier_pb2.DecodeOpen())


def test_only_a_session_without_a_round_may_have_broken_its_stream() -> None:
    session, _ = opened()
    assert session.suspect
    session.receive_round(done(3, 10))
    assert not session.suspect
    ended, _ = opened()
    ended.end(SessionEnded(verifier_pb2.FINISH_REASON_CANCELLED))
    assert not ended.suspect, "nothing of it was lost"


def test_a_broken_stream_is_always_retried() -> None:
    for error in (Internal("listener"), ResourceExhausted("slow"), Unavailable("gone")):
        assert isinstance(stream_lost(error, 1.0).error, Unavailable)
