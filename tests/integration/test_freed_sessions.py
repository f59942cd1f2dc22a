"""What a session held is freed when it ends, and not at the next garbage collection: thousands of long texts may end
before that."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from gateway.sessions.output_stream import OutputStream
from gateway.sessions.run import SessionRun
from tests.support.http_client import web
from tests.support.scripted_gateway import Answer, Setting

Made = list["weakref.ref[object]"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Runs and streams, as they are made; no collection comes meanwhile."""
    found: Made = []
    for kind in (SessionRun, OutputStream):

        def noted(self: object, *args: object, whole: object = kind.__init__) -> None:
            found.append(weakref.ref(self))
            whole(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(kind, "__init__", noted)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


async def test_a_session_that_ended_is_freed_without_a_collection(setting: Setting, made: Made) -> None:
    front = await setting.front(setting.verifier())
    await front.generate(max_tokens=40)
    await all_freed(made, sessions=1)


async def test_a_session_that_its_client_left_is_freed_without_a_collection(setting: Setting, made: Made) -> None:
    front = await setting.front(setting.verifier(limit=9))
    call, answer = front.call(), Answer()
    while len(answer.tokens) < 9:
        answer.add(await call.read())
    call.cancel()
    await all_freed(made, sessions=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_over_http_is_freed_without_a_collection(setting: Setting, made: Made, stream: bool) -> None:
    async with AsyncExitStack() as stack:
        page = await web(setting, stack, setting.verifier())
        await page.client.post("/v1/completions", json={"prompt": "Tell me.", "max_tokens": 40, "stream": stream})
        await all_freed(made, sessions=1)


async def all_freed(made: Made, sessions: int) -> None:
    async with asyncio.timeout(20.0):
        while any(each() is not None for each in made):
            await asyncio.sleep(0.01)
    assert len(made) == 2 * sessions
