"""One request to a gateway, read as fast as it comes until the test has seen enough."""

from __future__ import annotations

import asyncio
from typing import Any

from slipstream.v1 import gateway_pb2
from tests.support.fleet import emulated_text


class Follower:
    """A client that follows a greedy text of an emulated target."""

    def __init__(self, stub: Any, prompt: list[int], max_tokens: int, **speculation: Any) -> None:
        self.tokens: list[int] = []
        self.session_id = ""
        self._stub = stub
        self.prompt = prompt
        self._request = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=prompt),
            max_tokens=max_tokens,
            sampling=gateway_pb2.SamplingOptions(temperature=0.0),
            speculation=gateway_pb2.SpeculationOptions(**speculation),
        )
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stub.Generate(self._request):
            if event.HasField("started"):
                self.session_id = event.started.session_id
            elif event.HasField("delta"):
                assert event.delta.offset == len(self.tokens)
                self.tokens += event.delta.token_ids

    async def drafted(self) -> int:
        record = await self._stub.GetSession(gateway_pb2.GetSessionRequest(session_id=self.session_id))
        return int(record.statistics.drafted)

    async def end(self) -> None:
        """Ends it: every token is the target's own."""
        await self._stub.Cancel(gateway_pb2.CancelRequest(session_id=self.session_id))
        await self.reading
        assert self.tokens == emulated_text(self.prompt, len(self.tokens))
