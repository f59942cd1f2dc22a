"""Rules of the protocol, each switched off: a simulation that does not notice proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from gateway.seat import Seat
from gateway.session import Session
from gateway.store.memory import MemoryStore
from gateway.story import Story
from slipstream.completion import Completion
from slipstream.v1 import gateway_pb2, verifier_pb2
from verifier_svc import reading
from verifier_svc.service import Peer


def _ungated(self: Seat, done: verifier_pb2.Round) -> None:
    self._length += len(done.token_ids)
    self._news.rounds.append(done)
    self._filled.set()


async def _show_first(self: Session, rounds: list[verifier_pb2.Round]) -> None:
    tokens = [token for done in rounds for token in done.token_ids]
    if tokens:
        self._story.tell(tokens)
        await self._log.append(tokens)


def _believe(self: Completion, delta: gateway_pb2.Delta) -> str:
    self.token_ids += delta.token_ids
    self.text += delta.text
    return delta.text


def _without(owner: Any, name: str, instead: Any) -> Callable[[ExitStack], Any]:
    return lambda stack: stack.enter_context(mock.patch.object(owner, name, instead))


_FOLLOW = Story.follow
HONEST = "a stream resumes at an offset"
"""Tried where every stream keeps gRPC's promise."""

RULES: dict[str, list[Callable[[ExitStack], Any]]] = {
    "the store fences": [_without(MemoryStore, "_check", lambda *_: None)],
    "first logged, then shown": [_without(Session, "_show", _show_first)],
    "rounds are dropped by epoch and base": [_without(Seat, "receive", _ungated)],
    "a client takes what follows what it has": [_without(Completion, "_extend", _believe)],
    HONEST: [
        _without(Completion, "_extend", _believe),
        _without(Story, "follow", lambda self, offset=0, characters=None, revision=None: _FOLLOW(self)),
    ],
    "a stream's end ends its sessions": [_without(Peer, "leave", lambda self: None)],
    "candidates are checked": [_without(reading, "check", lambda frame, vocabulary_size, limits: frame)],
}


@contextmanager
def switched_off(rule: str) -> Iterator[None]:
    with ExitStack() as stack:
        for switch in RULES[rule]:
            switch(stack)
        yield
