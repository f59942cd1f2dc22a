"""Senders of a load's requests: over gRPC, or over HTTP as streams of OpenAI's completions, to any server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from measurement.load.runner import Answered, Arrived, Send
from slipstream.client.client import pieces
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint, check_plaintext_key
from slipstream.errors import FailedPrecondition, Unavailable
from slipstream.v1 import gateway_pb2

if TYPE_CHECKING:
    import httpx

EVENT, END = "data:", "[DONE]"


@asynccontextmanager
async def sending_grpc(
    gateway: GatewayEndpoint, requests: Sequence[gateway_pb2.GenerateRequest]
) -> AsyncIterator[Send]:
    """Sends these requests by their index over one channel. Raises what `GatewayEndpoint.channel` raises."""
    async with gateway.channel() as channel:

        async def send(index: int, arrived: Arrived) -> Answered:
            completion = Completion()
            async for _ in pieces([channel], requests[index], completion):
                arrived()
            seen = completion.finished.statistics
            tokens = completion.finished.output_tokens
            return Answered(tokens, seen.rounds, seen.rounds_with_drafts, seen.drafted, seen.accepted)

        yield send


@asynccontextmanager
async def sending_http(
    url: str, bodies: Sequence[Mapping[str, Any]], key: str = "", ca: str = "", plaintext_key: bool = False
) -> AsyncIterator[Send]:
    """Sends these bodies by their index to URL/v1/completions, each as a stream that ends with its usage. Raises
    FailedPrecondition where httpx is not installed, or the key would be sent in plaintext to another machine without
    `plaintext_key`."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise FailedPrecondition("--http needs httpx; run: pip install httpx.", reason="NOT_INSTALLED") from error
    if key and urlsplit(url).scheme != "https" and not plaintext_key:
        check_plaintext_key(urlsplit(url).netloc, url, "an https address")
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    # As many connections as requests: a pool with a bound would hold requests back until the server answered others.
    bounds = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    verify: Any = httpx.create_ssl_context(verify=ca) if ca else True
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=bounds, timeout=None, trust_env=False, verify=verify
    ) as client:

        async def send(index: int, arrived: Arrived) -> Answered:
            try:
                async with client.stream("POST", "/v1/completions", json={**bodies[index], **asked}) as response:
                    if response.status_code != 200:
                        text = (await response.aread()).decode(errors="replace")
                        raise Unavailable(f"HTTP {response.status_code}: {text[:200]}", reason="HTTP_STATUS")
                    return await _read(response, arrived)
            except httpx.HTTPError as error:
                raise Unavailable(f"{url}: {error or type(error).__name__}", reason="HTTP_FAILED") from error

        yield send


async def _read(response: httpx.Response, arrived: Arrived) -> Answered:
    answered, done = None, False
    async for line in response.aiter_lines():
        if not line.startswith(EVENT):
            continue
        if (data := line[len(EVENT) :].strip()) == END:
            done = True
            continue
        event = _parsed(data)
        if "error" in event:
            raise Unavailable(f"the stream broke off: {str(event['error'])[:200]}", reason="STREAM_LOST")
        if any(choice.get("text") for choice in event.get("choices") or ()):
            arrived()
        if event.get("usage"):
            answered = _answered(event)
    if answered is None or not done:
        raise Unavailable("the stream ended without its usage.", reason="STREAM_LOST")
    return answered


def _parsed(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise Unavailable(f"an event of the stream is no JSON: {data[:80]}", reason="GARBLED") from error
    if not isinstance(event, dict):
        raise Unavailable(f"an event of the stream is no object: {data[:80]}", reason="GARBLED")
    return event


def _answered(event: Mapping[str, Any]) -> Answered:
    seen = (event.get("metrics") or {}).get("speculative_decoding") or {}
    return Answered(
        tokens=int(event["usage"]["completion_tokens"]),
        rounds_with_drafts=int(seen.get("num_spec_steps", 0)),
        drafted=int(seen.get("num_draft_tokens", 0)),
        accepted=int(seen.get("num_accepted_draft_tokens", 0)),
    )
