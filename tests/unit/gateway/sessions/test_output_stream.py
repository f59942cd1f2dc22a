"""A client that follows a stream, from any offset and however often it breaks off, gets the same tokens and text."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capacity.clock import run as run_virtually
from gateway.sessions.output_stream import QUIET_S, Event, OutputStream
from gateway.text.transcript import Transcript
from slipstream.errors import OutOfRange, Unavailable
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2

WORDS = ["a", "b", "ab", "", "X", "XY", "Z", "é"]
STOP = "XYZ"


class Spelling:
    """Token i is word i; an empty word is held back until the next one, as half a character is."""

    def __init__(self) -> None:
        self._held = 0

    def push(self, token: int) -> str:
        if not WORDS[token]:
            self._held += 1
            return ""
        return self.flush() + WORDS[token]

    def flush(self) -> str:
        text, self._held = "?" * self._held, 0
        return text


def new_stream() -> OutputStream:
    return OutputStream(gateway_pb2.Started(session_id="s"), Transcript(Spelling(), [STOP]))


def ended(tokens: list[int]) -> OutputStream:
    stream = new_stream()
    stream.append_tokens(tokens)
    end(stream)
    return stream


def end(stream: OutputStream) -> None:
    stream.conclude()
    keep = stream.transcript.carrying()
    stream.finish(gateway_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH, output_tokens=keep))


class Client:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finished = False

    async def follow(self, stream: OutputStream, *, counted: bool = True) -> None:
        async with aclosing(stream.follow(len(self.tokens), len(self.text) if counted else None)) as said:
            async for event in said:
                self.receive_event(event)

    async def visit(self, stream: OutputStream) -> None:
        """Hears what there is, then hangs up."""
        missing = stream.transcript.carrying() > len(self.tokens)
        async with aclosing(stream.follow(len(self.tokens), len(self.text))) as said:
            await anext(said)
            if missing and not stream.transcript.stop:
                self.receive_event(await anext(said))

    def receive_event(self, event: Event) -> None:
        if isinstance(event, gateway_pb2.Delta):
            assert event.offset == len(self.tokens)
            self.tokens += event.token_ids
            self.text += event.text
        self.finished = self.finished or isinstance(event, gateway_pb2.Finished)


texts = st.lists(st.integers(0, len(WORDS) - 1), max_size=12)


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.integers(0, 4), max_size=6))
def test_a_client_that_reconnects_misses_nothing_and_receives_nothing_twice(
    tokens: list[int], visits: list[int]
) -> None:
    async def run() -> None:
        whole, client = Client(), Client()
        await whole.follow(ended(tokens))
        stream, left = new_stream(), list(tokens)
        for more in visits:
            stream.append_tokens(left[:more])
            del left[:more]
            await client.visit(stream)
        stream.append_tokens(left)
        end(stream)
        await client.follow(stream)
        assert (client.text, client.tokens, client.finished) == (whole.text, whole.tokens, True)

    asyncio.run(run())


@settings(deadline=None)
@given(texts, st.integers(0, 12))
def test_the_text_behind_a_number_of_tokens_is_that_which_a_client_of_them_lacks(tokens: list[int], have: int) -> None:
    async def run() -> None:
        whole, part = Client(), Client()
        await whole.follow(ended(tokens))
        early = new_stream()
        early.append_tokens(tokens[:have])
        await part.visit(early)
        await part.follow(ended(tokens), counted=False)
        assert (part.tokens, part.text) == (whole.tokens, whole.text)

    asyncio.run(run())


@settings(deadline=None)
@given(texts, st.lists(st.integers(1, 4), min_size=12, max_size=12), st.integers(0, 20), st.integers(0, 3))
def test_a_stream_with_an_interval_has_the_same_tokens_in_deltas_of_that_size(
    tokens: list[int], sizes: list[int], interval: int, have: int
) -> None:
    """But for the first one and the last one; nothing that waits in it keeps the verifier waiting."""

    async def run() -> None:
        whole, part, early = Client(), Client(), new_stream()
        await whole.follow(ended(tokens))
        early.append_tokens(tokens[:have])
        await part.visit(early)
        begun, stream, lengths, left = len(part.tokens), new_stream(), list[int](), list(tokens)

        async def follow() -> None:
            async for event in stream.follow(len(part.tokens), len(part.text), interval=interval):
                part.receive_event(event)
                if isinstance(event, gateway_pb2.Delta):
                    lengths.append(len(event.token_ids))

        follower = asyncio.create_task(follow())
        await asyncio.sleep(0)
        for size in sizes:
            stream.append_tokens(left[:size])
            left = left[size:]
            for _ in range(3):
                await asyncio.sleep(0)
            assert stream.lag == 0
        end(stream)
        await follower
        assert (part.tokens, part.text, part.finished) == (whole.tokens, whole.text, True)
        first = 0 if begun else 1
        assert all(length >= interval for length in lengths[first:-2]), lengths

    asyncio.run(run())


async def test_tokens_that_come_while_a_slow_client_takes_a_message_wait_for_its_interval_and_count_as_taken() -> None:
    stream = new_stream()
    async with aclosing(stream.follow(interval=12)) as events:
        await anext(events)
        stream.append_tokens([0] * 4)
        await anext(events)
        stream.append_tokens([0] * 4)  # the client still takes the first 4
        assert stream.lag == 8
        following = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        assert stream.lag == 0 and not following.done()
        stream.append_tokens([0] * 8)
        delta = await following
        assert isinstance(delta, gateway_pb2.Delta) and len(delta.token_ids) == 12


@pytest.mark.parametrize("interval", [0, 12])
async def test_tokens_that_come_with_the_end_while_a_slow_client_takes_a_message_are_sent(interval: int) -> None:
    stream = new_stream()
    async with aclosing(stream.follow(interval=interval)) as events:
        await anext(events)
        stream.append_tokens([0] * 4)
        await anext(events)
        stream.append_tokens([0] * 4)
        end(stream)
        assert [len(event.token_ids) async for event in events if isinstance(event, gateway_pb2.Delta)] == [4]


async def test_a_client_of_one_answer_is_woken_for_the_first_tokens_and_for_the_end() -> None:
    stream, events = new_stream(), list[Event]()

    async def follow() -> None:
        async for event in stream.follow(interval=2**31):
            events.append(event)

    follower = asyncio.create_task(follow())
    for _ in range(1000):
        stream.append_tokens([0])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(events) == 2 and stream.lag == 0
    end(stream)
    await follower
    deltas = [list(event.token_ids) for event in events if isinstance(event, gateway_pb2.Delta)]
    assert deltas == [[0], [0] * 999]


def test_a_client_with_a_long_interval_receives_what_there_is_after_some_seconds() -> None:
    async def main() -> None:
        stream, client, clock = new_stream(), Client(), asyncio.get_running_loop().time

        async def follow() -> None:
            async for event in stream.follow(interval=100):
                client.receive_event(event)

        follower = asyncio.create_task(follow())
        sizes = list[tuple[float, int]]()
        for _ in range(140):  # a token in each 0.1 s
            stream.append_tokens([0])
            await asyncio.sleep(0.1)
            if not sizes or sizes[-1][1] != len(client.tokens):
                sizes.append((round(clock(), 3), len(client.tokens)))
        assert [size for _, size in sizes] == [1, 51, 101]
        assert all(later - earlier == pytest.approx(QUIET_S, abs=0.11) for (earlier, _), (later, _) in pairwise(sizes))
        assert stream.lag == 0 and not client.finished
        end(stream)
        await follower
        assert len(client.tokens) == 140 and client.finished

    run_virtually(main())


@pytest.mark.parametrize("interval", [0, 8])
async def test_a_client_that_reads_no_more_keeps_the_verifier_waiting_whatever_its_interval(interval: int) -> None:
    """Control of the lag: what counts as taken is what the stream itself holds back, not what the client leaves."""
    stream = new_stream()
    async with aclosing(stream.follow(interval=interval)) as events:
        await anext(events)
        stream.append_tokens([0] * 20)
        await anext(events)  # asks for no other one: these 20 are not taken yet
        stream.append_tokens([0] * 20)
        assert stream.lag == 40


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    stream = new_stream()
    follower = asyncio.create_task(Client().follow(stream))
    await asyncio.sleep(0)
    follower.cancel()
    await asyncio.wait([follower])
    assert not stream._waiting and not stream.followed
    stream.append_tokens([0])
    assert stream.lag == 1


async def test_an_offset_that_the_session_never_reached_is_out_of_range() -> None:
    client = Client()
    client.tokens = [0] * 3
    with pytest.raises(OutOfRange):
        await client.follow(ended([0, 1]))


async def test_a_client_that_is_ahead_waits_until_the_session_is_too() -> None:
    stream, client = new_stream(), Client()
    client.tokens, client.text = [0, 1], "ab"
    follower = asyncio.create_task(client.follow(stream))
    await asyncio.sleep(0)
    stream.append_tokens([0, 1, 2])
    end(stream)
    await follower
    assert (client.tokens, client.text) == ([0, 1, 2], "abab")


async def test_tokens_that_a_client_has_already_count_as_taken_once_they_are_generated() -> None:
    stream, client, took = new_stream(), Client(), list[int]()
    client.tokens, client.text, stream.on_taken = [0, 1, 2], "abab", took.append
    follower = asyncio.create_task(client.follow(stream))
    await asyncio.sleep(0)
    for tokens in ([0, 1], [2, 3]):
        stream.append_tokens(tokens)
        await asyncio.sleep(0)
    await stream.wait_for_clients(1)
    assert (took, stream.lag) == ([2, 2], 0)
    end(stream)
    await follower


async def test_followers_receive_a_failure_after_the_tokens_before_it() -> None:
    stream, client = new_stream(), Client()
    stream.append_tokens([0, 1])
    stream.fail(Unavailable("gone", reason="X"))
    with pytest.raises(Unavailable):
        await client.follow(stream)
    assert client.tokens == [0, 1]


@settings(deadline=None)
@given(texts, st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_rounds_and_log_probabilities_come_with_their_tokens(tokens: list[int], sizes: list[int]) -> None:
    """Of tokens that a stop string cuts off none; a round's texts are whole when it is sent."""

    async def run() -> None:
        stream, received, left, at = new_stream(), list[gateway_pb2.Delta](), list(tokens), 0

        async def follow() -> None:
            async for event in stream.follow():
                if isinstance(event, gateway_pb2.Delta):
                    received.append(event)

        follower = asyncio.create_task(follow())
        for number, size in enumerate(sizes):
            if more := left[:size]:
                likely = [types_pb2.TokenLogprobs(logprob=-float(at + each)) for each in range(len(more))]
                stream.append_tokens(more, likely, [gateway_pb2.RoundDetails(number=number, offset=at)])
                at, left = at + len(more), left[size:]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert stream.lag == 0, "tokens that are held back keep nobody waiting"
        end(stream)
        await follower
        whole = Client()
        await whole.follow(ended(tokens))
        assert [token for delta in received for token in delta.token_ids] == whole.tokens
        assert "".join(delta.text for delta in received) == whole.text
        shown = len(whole.tokens)
        assert [each.logprob for delta in received for each in delta.logprobs] == [-float(at) for at in range(shown)]
        rounds = [each for delta in received for each in delta.rounds]
        assert [each.offset for each in rounds] == [each.offset for each in stream._rounds if each.offset < shown]
        texts = [text for each in rounds for text in each.texts]
        assert "".join(texts) + stream.transcript.rest == whole.text

    asyncio.run(run())


async def test_log_probabilities_stay_with_their_tokens_when_another_gateway_went_on_meanwhile() -> None:
    """No record has any."""
    stream, likely = new_stream(), [types_pb2.TokenLogprobs(logprob=-float(token)) for token in range(3)]
    for tokens, told in (([0], likely[:1]), ([1], []), ([2], likely[2:])):
        stream.append_tokens(tokens, told)
    end(stream)
    deltas = [event async for event in stream.follow() if isinstance(event, gateway_pb2.Delta)]
    assert [list(delta.token_ids) for delta in deltas] == [[0, 1], [2]]
    assert [[each.logprob for each in delta.logprobs] for delta in deltas] == [[], [-2.0]]


async def test_the_fastest_of_several_clients_sets_the_pace_and_the_last_departure_is_registered() -> None:
    stream, taken = new_stream(), list[int]()
    stream.on_taken = taken.append
    stream.append_tokens([0] * 4)
    slow, fast = Client(), Client()
    async with aclosing(stream.follow()) as events:
        slow.receive_event(await anext(events))
        follower = asyncio.create_task(fast.follow(stream))
        while len(fast.tokens) < 4:
            await asyncio.sleep(0)
        stream.append_tokens([1])
        await stream.wait_for_clients(8)
        assert stream.lag <= 1
        end(stream)
        await follower
        assert sum(taken) == 5 and stream.followed and slow.tokens == []
    assert not stream.followed


class Counted(list[str]):
    """Counts the pieces of text that slices of it copied."""

    copied = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = super().__getitem__(index)
        self.copied += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("characters", [None, 0, 5000, 2**32 - 1])
async def test_the_cost_of_a_delta_depends_on_new_tokens_and_not_on_the_text_before_them(
    characters: int | None,
) -> None:
    """Whatever a client says that it has: it may be ahead of the text for ever."""
    stream, before, after = new_stream(), 5000, 200
    stream.append_tokens([0] * before)
    pieces = stream._pieces = Counted(stream._pieces)
    async with aclosing(stream.follow(before, characters)) as events:
        await anext(events)  # Started
        for _ in range(after):
            stream.append_tokens([0])
            event = await anext(events)
            assert isinstance(event, gateway_pb2.Delta) and len(event.token_ids) == 1
    caught_up = before if characters == 0 else 0
    assert pieces.copied <= caught_up + 2 * after
