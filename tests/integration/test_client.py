"""The Python client: whole outputs, pieces that go on when a gateway dies, and reads that may be given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store.memory import MemoryBackend
from slipstream import AsyncClient, AsyncStream, Client, RetrySettings
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from tests.support.gateway_calls import store
from tests.support.scripted_gateway import Front, Setting

NOBODY = "127.0.0.1:1"
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ mood }}{% endfor %}{{ tools }}"


@pytest.fixture
async def front(setting: Setting, tmp_path: Path) -> Front:
    """A gateway whose sessions stand still after 9 tokens until `go_on`."""
    (tmp_path / "template").write_text(TEMPLATE)
    front = await setting.front(setting.verifier(limit=9), chat_template=str(tmp_path / "template"))
    return front


@pytest.fixture
async def client(front: Front) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(front.gateway.address) as client:
        yield client


def go_on(front: Front) -> list[int]:
    """The whole script."""
    front.verifiers[0].limit = None
    return front.verifiers[0].script


async def first_nine(stream: AsyncStream) -> list[Any]:
    found = []
    while sum(len(piece.token_ids) for piece in found) < 9:
        piece = await stream.read()
        assert piece is not None
        found.append(piece)
    return found


async def test_a_text_comes_whole_and_in_pieces(front: Front, client: AsyncClient) -> None:
    script = go_on(front)
    whole = await client.generate("Tell me.", max_tokens=40, seed=7)
    assert (whole.token_ids, whole.seed, whole.finish_reason) == (script[:40], 7, "length")
    pieces = [piece async for piece in client.stream("Tell me.", max_tokens=40)]
    assert "".join(piece.text for piece in pieces) == whole.text == front.tokenizer.decode(script[:40])
    position = 0
    for piece in pieces:
        assert piece.offset == position
        position += len(piece.token_ids)
    assert position == 40


async def test_every_option_reaches_the_verifier(front: Front, client: AsyncClient) -> None:
    go_on(front)
    found = await client.generate(
        [65, 66],
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        logit_bias={7: 1.5},
        stop_token_ids=[front.tokenizer.get_vocab_size() - 1],
        speculation=False,
        regex=".*",
        workload="code",
        seed=None,
    )
    assert len(found.token_ids) == 5
    [opened] = front.verifiers[0].opens()
    assert list(opened.prefix.token_ids) == [65, 66]
    assert (opened.sampling.temperature, opened.sampling.top_k, dict(opened.sampling.logit_bias)) == (0.5, 3, {7: 1.5})
    assert (opened.policy.max_draft_tokens, opened.structured_output.regex) == (0, ".*")


async def test_allowed_tokens_reach_the_verifier(front: Front, client: AsyncClient) -> None:
    go_on(front)
    await client.generate([65, 66], max_tokens=2, allowed_token_ids=[8, 7])
    assert list(front.verifiers[0].opens()[0].sampling.allowed_token_ids) == [8, 7]


async def test_a_conversation_is_answered_by_the_models_template(front: Front, client: AsyncClient) -> None:
    script = go_on(front)
    said = [{"role": "user", "content": "Hi", "name": None}, {"role": "user", "content": [{"text": "you"}]}]
    answer = await client.chat(said, tools=[{"name": "f"}], template_variables={"mood": "!"}, max_tokens=12)
    assert answer.token_ids == script[:12]
    prompt = front.tokenizer.decode(answer.started.prompt_token_ids)
    assert prompt == "<user>Hi!<user>[{'text': 'you'}]![{'name': 'f'}]"


async def test_a_read_that_is_given_up_loses_nothing(front: Front, client: AsyncClient) -> None:
    stream = client.stream("Tell me.", max_tokens=40)
    heard = await first_nine(stream)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream.read()
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    script = go_on(front)
    await front.verifiers[0].until(lambda: not front.verifiers[0].sessions)
    reader.cancel()  # as its piece comes, or just before
    await asyncio.wait([reader])
    if not reader.cancelled():
        heard.append(reader.result())
    heard += [piece async for piece in stream]
    assert [token for piece in heard for token in piece.token_ids] == script[:40]


async def test_a_reader_of_a_stream_closed_by_another_task_receives_the_end(front: Front, client: AsyncClient) -> None:
    stream = client.stream("Tell me.", max_tokens=40)
    await first_nine(stream)
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    await stream.close()
    assert await reader is None
    assert await stream.read() is None


async def test_an_error_is_typed_and_comes_at_every_read(front: Front, client: AsyncClient) -> None:
    stream = client.stream("Tell me.", model="nobody's")
    for _ in range(2):
        with pytest.raises(NotFound) as caught:
            await stream.read()
        assert caught.value.reason == "NO_MODEL"
    with pytest.raises(NotFound) as caught:
        await client.cancel("nobody")
    assert caught.value.reason == "NO_SESSION"


async def test_a_model_without_a_template_refuses_conversations(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    async with AsyncClient(front.gateway.address) as client:
        with pytest.raises(FailedPrecondition) as caught:
            await client.chat([{"role": "user", "content": "Hi"}])
    assert caught.value.reason == "CHAT_TEMPLATE_MISSING"


async def test_a_session_is_rolled_back_branched_and_cancelled(front: Front, client: AsyncClient) -> None:
    stream = client.stream("Tell me.", max_tokens=40)
    await first_nine(stream)
    name = stream.completion.session_id
    branch = await client.branch(name, 4)
    assert (branch.session_id != name, branch.tokens) == (True, 4)
    back = await client.rollback(name, 3, edit=[65, 66], seed=8)
    assert (back.session_id, back.tokens) == (name, 3)
    rest = client.resume(back)
    edited = await first_nine_or_all(rest, 6)
    assert edited[:2] == [65, 66]
    record = await client.session(name)
    assert list(record.output_token_ids[3:5]) == [65, 66] and record.seed == 8
    await client.cancel(name)
    assert (await rest.finish()).finish_reason == "cancelled"
    script = go_on(front)
    assert (await client.resume(branch).finish()).token_ids[4:] == script[4:40]


async def first_nine_or_all(stream: AsyncStream, tokens: int) -> list[int]:
    found: list[int] = []
    while len(found) < tokens:
        piece = await stream.read()
        assert piece is not None
        found += piece.token_ids
    return found


async def test_the_client_lists_models_and_tokenizes_text(front: Front, client: AsyncClient) -> None:
    [served] = await client.models()
    assert (served.model.name, served.verifiers) == ("toy", 1)
    assert await client.tokenize("Tell me.") == front.tokenizer.encode("Tell me.").ids


async def test_a_request_begins_on_the_first_gateway_that_answers(front: Front) -> None:
    script = go_on(front)
    async with AsyncClient([NOBODY, front.gateway.address]) as client:
        assert (await client.generate("Tell me.", max_tokens=12)).token_ids == script[:12]
        assert await client.tokenize("a")
    async with AsyncClient([NOBODY, NOBODY]) as client:
        for call in (client.generate("Tell me."), client.tokenize("a")):
            with pytest.raises(Unavailable) as caught:
                await call
            assert caught.value.reason == "NO_GATEWAY"
    async with AsyncClient([NOBODY, front.gateway.address], retry=RetrySettings()) as client:
        with pytest.raises(Unavailable, match="no gateway answered"):
            await client.generate("Tell me.")


async def test_a_session_lost_by_the_store_is_streamed_without_repeating_a_token(setting: Setting) -> None:
    front = await setting.front(setting.verifier(limit=9), store=store(MemoryBackend(), "a"))
    beside = await setting.beside(front, store(MemoryBackend(), "b"))  # that knows nothing of it
    async with AsyncClient([front.gateway.address, beside.gateway.address]) as client:
        stream = client.stream("Tell me.", max_tokens=40)
        heard = await first_nine(stream)
        script = go_on(front)
        await front.gateway.sessions.close()
        await front.gateway.server.stop(0)
        heard += [piece async for piece in stream]
    assert [token for piece in heard for token in piece.token_ids] == script[:40]
    assert "".join(piece.text for piece in heard) == stream.completion.text == front.tokenizer.decode(script[:40])


async def test_the_synchronous_client_behaves_like_the_asynchronous_one(front: Front) -> None:
    script = go_on(front)

    def use() -> None:
        with Client([NOBODY, front.gateway.address]) as client:
            whole = client.generate("Tell me.", max_tokens=40)
            assert whole.token_ids == script[:40]
            with client.stream("Tell me.", max_tokens=40) as stream:
                assert next(stream).text
                assert stream.finish().text == whole.text
            assert [token for piece in client.stream("Tell me.", max_tokens=9) for token in piece.token_ids] == script[
                :9
            ]
            answer = client.chat([{"role": "user", "content": "Hi"}], max_tokens=3)
            assert "".join(piece.text for piece in client.stream_chat([{"role": "user"}], max_tokens=3)) == answer.text
            back = client.rollback(whole.session_id, 5)
            assert client.resume(back).finish().token_ids[5:] == script[5:40]
            branch = client.branch(whole.session_id, 5, edit="ab", max_tokens=9)
            assert client.resume(branch).finish().token_ids[5:7] == client.tokenize("ab")
            assert client.models()[0].model.name == client.session(whole.session_id).model == "toy"
            client.cancel(whole.session_id)
            with pytest.raises(NotFound):
                client.cancel("nobody")
        client.close()
        with pytest.raises(FailedPrecondition) as caught:
            client.generate("Tell me.")
        assert caught.value.reason == "CLOSED"

    await asyncio.to_thread(use)


async def test_closing_a_client_releases_the_session_of_a_stream_that_was_not_read_to_its_end(front: Front) -> None:
    def use() -> str:
        with Client(front.gateway.address) as client:
            stream = client.stream("Tell me.", max_tokens=40)
            next(stream)
            return stream.completion.session_id

    name = await asyncio.to_thread(use)
    async with asyncio.timeout(60):
        while (await front.store.read(name)).leased:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"max_tokens": "many"}, "cannot be sent"),
        ({"seed": -1}, "cannot be sent"),
        ({"regex": "a", "json_object": True}, "one of json_schema"),
        ({"json_schema": {"a": object()}}, "cannot be sent"),
        ({"acceptance": "sometimes"}, "sometimes"),
    ],
)
async def test_an_option_that_does_not_fit_is_named_before_anything_is_sent(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        AsyncClient(NOBODY).stream("Tell me.", **options)


def test_a_client_needs_a_server_and_known_options() -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        AsyncClient([])
    with pytest.raises(InvalidArgument, match="key"):
        AsyncClient(NOBODY, key="x")  # type: ignore[call-arg]


def test_the_key_of_the_environment_is_not_sent_in_plaintext(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    with Client("gateway.example:50051") as client, pytest.raises(FailedPrecondition, match="plaintext"):
        client.generate("Tell me.")
