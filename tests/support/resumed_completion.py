"""A completion that broke off, read to its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import grpc

from slipstream.client.client import RetrySettings, rest
from slipstream.client.completion import Completion
from slipstream.errors import SlipstreamError


async def resume(
    channels: Sequence[grpc.aio.Channel],
    completion: Completion,
    retry: RetrySettings | None = None,
    error: SlipstreamError | None = None,
) -> None:
    async with aclosing(rest(channels, completion, retry, error)) as found:
        async for _ in found:
            pass
