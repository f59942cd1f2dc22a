"""Completions from gateways, resumed where they are interrupted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from slipstream.client.completion import TRACE_ID, Completion
from slipstream.concurrency import Backoff
from slipstream.errors import Aborted, NotFound, SlipstreamError, Unavailable
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

Echo = Callable[[str], None]
MOST_PAUSE_S = 1.0
"""Most seconds between two attempts."""
Call = Any
"""A Generate or Resume call, whose type gRPC does not name."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How long a client keeps trying."""

    resume_s: float = 30.0
    """Seconds without progress after which resuming is given up; longer than the lease of a dead gateway. Every
    gateway is called at least once."""
    stall_s: float | None = None
    """Seconds without an event after which a gateway is given up; None waits for as long as the connection lives."""


async def complete(
    channel: grpc.aio.Channel,
    request: gateway_pb2.GenerateRequest,
    echo: Echo | None = None,
    others: Sequence[grpc.aio.Channel] = (),
    retry: RetrySettings | None = None,
    completion: Completion | None = None,
) -> Completion:
    """Runs one request to its end and calls `echo` with each piece of text. An interrupted completion is resumed, on
    the gateways of `others` too. A caller that passes a `completion` can read its partial content after a cancellation.

    A session that is lost, because its gateway died and the store lost its record, is started again with the same seed,
    which gives the same text under the coupled rule.

    Raises the SlipstreamError that the gateway sent, Unavailable where the completion did not start or continue, and
    Aborted where a restarted session gives another text.
    """
    retry, echo_once = retry or RetrySettings(), _EchoOnce(echo)
    completion = completion or Completion()
    channels, lost_at, backoff = [channel, *others], None, Backoff(0.05, MOST_PAUSE_S)
    while True:
        try:
            await _fold(
                completion, gateway_pb2_grpc.GatewayServiceStub(channels[0]).Generate(request), echo_once, retry
            )
            return completion
        except SlipstreamError as error:
            if not completion.started.session_id:
                # A first request fails at once; only a restarted session tries other gateways.
                if lost_at is None or _now() - lost_at > retry.resume_s:
                    raise _explained(error) from error
                await backoff.wait()
            elif await _resumed(channels, completion, echo_once, retry, error):
                return completion
            else:
                lost_at = _now()
                request = _seeded(request, completion.started.seed)
                completion.forget()
                echo_once.restart()
        channels = [*channels[1:], channels[0]]


async def _resumed(
    channels: Sequence[grpc.aio.Channel],
    completion: Completion,
    echo: _EchoOnce,
    retry: RetrySettings,
    error: SlipstreamError,
) -> bool:
    """Returns whether the gateways still had the session."""
    try:
        await resume(channels, completion, echo, retry, error)
    except NotFound as lost:
        if lost.reason != "NO_SESSION":
            raise
        return False
    return True


def _seeded(request: gateway_pb2.GenerateRequest, seed: int) -> gateway_pb2.GenerateRequest:
    again = gateway_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.sampling.seed = seed
    return again


class _EchoOnce:
    """Echoes each piece of a text once, however often the text is started again."""

    def __init__(self, echo: Echo | None) -> None:
        self._echo = echo
        self._echoed = ""
        self._at = 0
        """Characters received since the last start."""

    def restart(self) -> None:
        self._at = 0

    def __call__(self, piece: str) -> None:
        echoed = self._echoed[self._at : self._at + len(piece)]
        if not piece.startswith(echoed):
            raise Aborted(
                "the session was lost, and its restart gives another text; send the request again.",
                reason="SESSION_LOST",
            )
        self._at += len(piece)
        if fresh := piece[len(echoed) :]:
            self._echoed += fresh
            if self._echo is not None:
                self._echo(fresh)


async def resume(
    channels: Sequence[grpc.aio.Channel],
    completion: Completion,
    echo: Echo | None = None,
    retry: RetrySettings | None = None,
    error: SlipstreamError | None = None,
) -> None:
    """Continues a completion, of which at least the session id is known, on one gateway after the other. `error`, if
    given, interrupted it on the first one. Raises what `complete` raises."""
    retry = retry or RetrySettings()
    progress, seen, attempts, backoff = _now(), len(completion.token_ids), 0, Backoff(0.05, MOST_PAUSE_S)
    for channel in itertools.cycle(channels if error is None else [*channels[1:], channels[0]]):
        if error is not None:
            if not isinstance(error, Unavailable):
                raise error
            if len(completion.token_ids) > seen:
                progress, seen, attempts = _now(), len(completion.token_ids), 0
                backoff.reset()
            if attempts >= len(channels) and _now() - progress > retry.resume_s:
                raise _broken_off(completion, error)
            if attempts:
                await backoff.wait()
        attempts += 1
        request = gateway_pb2.ResumeRequest(
            session_id=completion.started.session_id,
            offset=seen,
            characters=len(completion.text) if completion.text and not completion.begins else None,
            revision=completion.started.revision if completion.started.HasField("revision") else None,
        )
        try:
            await _fold(completion, gateway_pb2_grpc.GatewayServiceStub(channel).Resume(request), echo, retry)
            return
        except SlipstreamError as again:
            error = again


async def _fold(completion: Completion, call: Call, echo: Echo | None, retry: RetrySettings) -> None:
    """Raises the SlipstreamError behind a failed call."""
    try:
        while (event := await _next(call, retry.stall_s)) is not grpc.aio.EOF:
            text = completion.take(event)
            if echo is not None and text:
                echo(text)
        completion.trace_id = _trace_id(await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        completion.trace_id = _trace_id(error.trailing_metadata())
        raise error_of(error) from error
    except TimeoutError as error:
        raise Unavailable(f"the gateway sent nothing for {retry.stall_s} s.", reason="STALLED") from error
    finally:
        call.cancel()
    if not completion.finished.reason:
        raise Unavailable("the gateway ended the stream without a result.", reason="STREAM_LOST")


async def _next(call: Call, timeout_s: float | None) -> Any:
    async with asyncio.timeout(timeout_s):
        event = await call.read()
    if event is None:  # grpc.aio could not parse it; perhaps another gateway speaks this contract
        raise Unavailable("the gateway sent a message that is no protobuf of this contract.", reason="GARBLED")
    return event


def _trace_id(metadata: Iterable[tuple[str, Any]] | None) -> str:
    return next((value for key, value in metadata or () if key == TRACE_ID), "")


def _explained(error: SlipstreamError) -> SlipstreamError:
    """Names the problem where no gateway answered: an error of a gateway always has a reason."""
    if isinstance(error, Unavailable) and error.reason == error.code.name:
        detail = error.message.splitlines()[0][:200] if error.message else "no answer"
        sentence = f"no gateway answered ({detail}); start `slipstream serve`, or name its address."
        return Unavailable(sentence, reason="NO_GATEWAY")
    return error


def _broken_off(completion: Completion, error: SlipstreamError) -> SlipstreamError:
    """The error, with the command that continues the text."""
    session, seen = completion.started.session_id, len(completion.token_ids)
    detail = error.message.splitlines()[0][:200] if error.message else "no answer"
    rest = f"`slipstream resume {session} --offset {seen}`, on this gateway or another, prints the rest"
    return Unavailable(f"the text broke off after {seen} tokens ({detail}); {rest}.", reason=error.reason)


def _now() -> float:
    return asyncio.get_running_loop().time()
