"""Whoever follows a story, from wherever and however often it breaks off, hears the same tokens and the same text."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sessions.output_stream import Event, OutputStream
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


def new_story() -> OutputStream:
    return OutputStream(gateway_pb2.Started(session_id="s"), Transcript(Spelling(), [STOP]))


def ended(tokens: list[int]) -> OutputStream:
    story = new_story()
    story.tell(tokens)
    end(story)
    return story


def end(story: OutputStream) -> None:
    story.conclude()
    keep = story.transcript.carrying()
    story.finish(gateway_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH, output_tokens=keep))


class Client:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finished = False

    async def follow(self, story: OutputStream, *, counted: bool = True) -> None:
        async with aclosing(story.follow(len(self.tokens), len(self.text) if counted else None)) as said:
            async for event in said:
                self.hear(event)

    async def visit(self, story: OutputStream) -> None:
        """Hears what there is, then hangs up."""
        missing = len(story.tokens) > len(self.tokens)
        async with aclosing(story.follow(len(self.tokens), len(self.text))) as said:
            await anext(said)
            if missing and not story.transcript.stop:
                self.hear(await anext(said))

    def hear(self, event: Event) -> None:
        if isinstance(event, gateway_pb2.Delta):
            assert event.offset == len(self.tokens)
            self.tokens += event.token_ids
            self.text += event.text
        self.finished = self.finished or isinstance(event, gateway_pb2.Finished)


texts = st.lists(st.integers(0, len(WORDS) - 1), max_size=12)


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.integers(0, 4), max_size=6))
def test_a_client_that_comes_and_goes_misses_nothing_and_hears_nothing_twice(
    tokens: list[int], visits: list[int]
) -> None:
    async def run() -> None:
        whole, client = Client(), Client()
        await whole.follow(ended(tokens))
        story, left = new_story(), list(tokens)
        for more in visits:
            story.tell(left[:more])
            del left[:more]
            await client.visit(story)
        story.tell(left)
        end(story)
        await client.follow(story)
        assert (client.text, client.finished) == (whole.text, True)
        assert client.tokens[: len(whole.tokens)] == whole.tokens[: len(client.tokens)]

    asyncio.run(run())


@settings(deadline=None)
@given(texts, st.integers(0, 12))
def test_the_text_behind_a_number_of_tokens_is_that_which_a_client_of_them_lacks(tokens: list[int], have: int) -> None:
    async def run() -> None:
        whole, part = Client(), Client()
        await whole.follow(ended(tokens))
        early = new_story()
        early.tell(tokens[:have])
        await part.visit(early)
        if len(part.tokens) <= len(whole.tokens):
            await part.follow(ended(tokens), counted=False)
            assert (part.tokens, part.text) == (whole.tokens, whole.text)

    asyncio.run(run())


async def test_an_offset_that_the_session_never_reached_is_out_of_range() -> None:
    client = Client()
    client.tokens = [0] * 3
    with pytest.raises(OutOfRange):
        await client.follow(ended([0, 1]))


async def test_one_that_is_ahead_waits_until_the_session_is() -> None:
    story, client = new_story(), Client()
    client.tokens, client.text = [0, 1], "ab"
    follower = asyncio.create_task(client.follow(story))
    await asyncio.sleep(0)
    story.tell([0, 1, 2])
    end(story)
    await follower
    assert (client.tokens, client.text) == ([0, 1, 2], "abab")


async def test_what_a_client_has_already_counts_as_taken_once_it_is_told() -> None:
    story, client, took = new_story(), Client(), list[int]()
    client.tokens, client.text, story.took = [0, 1, 2], "abab", took.append
    follower = asyncio.create_task(client.follow(story))
    await asyncio.sleep(0)
    for tokens in ([0, 1], [2, 3]):
        story.tell(tokens)
        await asyncio.sleep(0)
    await story.lags(1)
    assert (took, story.lag) == ([2, 1, 1], 0)
    end(story)
    await follower


async def test_followers_hear_of_a_failure_after_what_was_said() -> None:
    story, client = new_story(), Client()
    story.tell([0, 1])
    story.fail(Unavailable("gone", reason="X"))
    with pytest.raises(Unavailable):
        await client.follow(story)
    assert client.tokens == [0, 1]


async def test_log_probabilities_stay_with_their_tokens_when_another_gateway_went_on_meanwhile() -> None:
    """No record has any."""
    story, likely = new_story(), [types_pb2.TokenLogprobs(logprob=-float(token)) for token in range(3)]
    for tokens, told in (([0], likely[:1]), ([1], []), ([2], likely[2:])):
        story.tell(tokens, told)
    end(story)
    deltas = [event async for event in story.follow() if isinstance(event, gateway_pb2.Delta)]
    assert [list(delta.token_ids) for delta in deltas] == [[0, 1], [2]]
    assert [[each.logprob for each in delta.logprobs] for delta in deltas] == [[], [-2.0]]


async def test_the_fastest_of_several_clients_sets_the_pace_and_the_last_one_is_noticed() -> None:
    story, gone, taken = new_story(), list[bool](), list[int]()
    story.deserted, story.took = lambda: gone.append(True), taken.append
    story.tell([0] * 4)
    slow, fast = Client(), Client()
    async with aclosing(story.follow()) as events:
        slow.hear(await anext(events))
        follower = asyncio.create_task(fast.follow(story))
        while len(fast.tokens) < 4:
            await asyncio.sleep(0)
        story.tell([1])
        await story.lags(8)
        assert story.lag <= 1
        end(story)
        await follower
        assert sum(taken) == 5 and not gone and slow.tokens == []
    assert gone
