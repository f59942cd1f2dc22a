"""One tenant's sessions on a verifier in virtual time (`benchmarks.virtual`), and what its client sees of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.virtual import VOCABULARY, System, decode_request
from slipstream.v1 import verifier_pb2


@dataclass
class Text:
    """One session as its gateway sees it."""

    prompt: list[int]
    opened: float
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.opened

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in pairwise(self.times))

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.output) - 1)


class Tenant:
    """One tenant's sessions, on a stream of their own."""

    def __init__(self, running: System, name: str) -> None:
        self._running, self._name = running, name
        self._gateway = running.gateway()
        self.texts: list[Text] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            for reply in await self._gateway.outbox.take():
                text = self.texts[reply.session]
                if isinstance(reply, verifier_pb2.Round):
                    text.output += reply.token_ids
                    text.times += [asyncio.get_running_loop().time()] * len(reply.token_ids)
                elif isinstance(reply, verifier_pb2.SessionEnd):
                    assert not reply.HasField("failure"), reply
                    text.done.set()

    def ask(self, prompt: int, tokens: int, candidates: int = 0) -> Text:
        """A text behind a prompt of so many tokens, which no other one begins like, with at most so many candidates in
        a step."""
        number = len(self.texts)
        first = [number % VOCABULARY, *map(ord, self._name), number // VOCABULARY]
        text = Text([*first, *[7] * (prompt - len(first))], asyncio.get_running_loop().time())
        self.texts.append(text)
        request = decode_request(number, text.prompt, tokens, candidates, [self._running.drafter], self._name)
        request.commands[0].open.tenant = self._name
        request.commands[0].open.key.id = f"{self._name}-{number}"
        self._gateway.receive(request)
        return text

    async def leave(self) -> None:
        self._reading.cancel()
        self._gateway.close()
