"""Calls to a gateway that a test reads piece by piece: begun, followed, read on, broken off."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from gateway.store.memory import MemoryBackend, MemoryStore
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2
from tests.support.scripted_gateway import Answer, Front, Setting


def store(memory: MemoryBackend, owner: str, lease_s: float = 60.0) -> MemoryStore:
    return MemoryStore(memory, owner=owner, ttl_s=60, lease_s=lease_s)


async def begun(front: Front, tokens: int = 9, **request: Any) -> tuple[Any, Answer]:
    """A call of which so many tokens have come."""
    call = front.call(**request)
    return call, await read_tokens(call, tokens)


async def following(front: Front, session: str, tokens: int = 9) -> tuple[Any, Answer]:
    """A client that follows a session, and its tokens."""
    call = front.stub.Resume(gateway_pb2.ResumeRequest(session_id=session))
    return call, await read_tokens(call, tokens)


async def read_tokens(call: Any, tokens: int) -> Answer:
    answer = Answer()
    while len(answer.tokens) < tokens:
        answer.add(await call.read())
    return answer


@dataclass
class Shared:
    """A session of which 9 tokens came, and a client that follows it on another gateway."""

    memory: MemoryBackend
    front: Front
    beside: Front
    call: Any
    answer: Answer
    follower: Any
    follower_answer: Answer

    @property
    def name(self) -> str:
        return self.answer.started.session_id

    @property
    def text(self) -> list[int]:
        """The session's whole text."""
        return self.front.verifiers[0].script[:40]

    def go_on(self) -> None:
        self.front.verifiers[0].limit = None


async def broken_off(call: Any, answer: Answer) -> Exception:
    """What the rest of the call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        await read_on(call, answer)
    return error_of(caught.value)


async def read_on(call: Any, answer: Answer) -> None:
    while (event := await call.read()) is not grpc.aio.EOF:
        answer.add(event)


async def left_after(front: Front, tokens: int = 9, **request: Any) -> Answer:
    """What a client had when it hung up, once the gateway has let the session go."""
    call, answer = await begun(front, tokens, **request)
    call.cancel()
    async with asyncio.timeout(60):
        while (await front.store.read(answer.started.session_id)).leased:
            await asyncio.sleep(0.01)
    return answer


async def shared_session(setting: Setting) -> Shared:
    memory = MemoryBackend()
    front = await setting.front(setting.verifier(limit=9), store=store(memory, "a"))
    beside = await setting.beside(front, store(memory, "b"))
    call, answer = await begun(front)
    return Shared(memory, front, beside, call, answer, *await following(beside, answer.started.session_id))
