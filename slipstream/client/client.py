"""Completions from gateways, resumed where they are interrupted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from slipstream.client.completion import TRACE_ID, Completion, Piece
from slipstream.concurrency import Backoff
from slipstream.errors import SERVING_ENDED, Aborted, NotFound, SlipstreamError, Unavailable
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc

Echo = Callable[[str], None]
MOST_PAUSE_S = 1.0
"""Most seconds between two attempts."""
Call = Any
"""A Generate or Resume call, whose type gRPC does not name."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Limits of a client's retries."""

    resume_s: float = 30.0
    """Seconds without progress after which resuming is given up; longer than the lease of a dead gateway. Every
    gateway is called at least once."""
    stall_s: float | None = None
    """Seconds without an event after which a gateway is given up; None waits for as long as the connection lives."""
    begin_anywhere: bool = False
    """A completion that the first gateway did not answer begins on another one."""
    begin_s: float = 0.0
    """Seconds for which, beyond one try of each gateway, a completion begins again that none answered: behind a name
    of DNS stand several, and in a rollout none of those may be there that the name had a moment ago."""


async def complete(
    channel: grpc.aio.Channel,
    request: gateway_pb2.GenerateRequest,
    echo: Echo | None = None,
    others: Sequence[grpc.aio.Channel] = (),
    retry: RetrySettings | None = None,
) -> Completion:
    """Runs one request to its end and calls `echo` with each piece of text. Raises what `pieces` raises."""
    completion = Completion()
    async with aclosing(pieces([channel, *others], request, completion, retry)) as found:
        async for piece in found:
            if echo is not None and piece.text:
                echo(piece.text)
    return completion


async def pieces(
    channels: Sequence[grpc.aio.Channel],
    request: gateway_pb2.GenerateRequest,
    completion: Completion,
    retry: RetrySettings | None = None,
) -> AsyncGenerator[Piece]:
    """The pieces of one request's output, which are added to `completion`. Where they break off they are resumed, on
    the other gateways too: each token and each character comes once.

    A session that is lost, because its gateway died and the store lost its record, is started again with the same seed,
    which gives the same text under the coupled rule.

    Raises the SlipstreamError that the gateway sent, Unavailable where the completion did not start or continue, and
    Aborted where a restarted session gives another text.
    """
    received = _ReceivedOnce()
    async with aclosing(_restarted(list(channels), request, completion, retry or RetrySettings())) as found:
        async for piece in found:
            if (fresh := received.fresh(piece)) is not None:
                yield fresh


async def _restarted(
    channels: list[grpc.aio.Channel],
    request: gateway_pb2.GenerateRequest,
    completion: Completion,
    retry: RetrySettings,
) -> AsyncGenerator[Piece]:
    """The pieces of one session after the other, until one ends. Each begins with the first token."""
    began, lost_at, refusals, backoff = _now(), None, 0, Backoff(0.05, MOST_PAUSE_S)
    while True:
        try:
            async with aclosing(_once(channels, request, completion, retry)) as found:
                async for piece in found:
                    yield piece
            return
        except SlipstreamError as error:
            refusals += 1
            if completion.session_id:
                if not isinstance(error, NotFound) or error.reason != "NO_SESSION":
                    raise
                lost_at, request = _now(), _seeded(request, completion.seed)
                completion.forget()
            elif not _may_begin_again(
                error, retry, lost_at, refusals < len(channels) or _now() - began < retry.begin_s
            ):
                raise explained_absence(error) from error
            else:
                await backoff.wait()
        channels = [*channels[1:], channels[0]]


async def _once(
    channels: Sequence[grpc.aio.Channel],
    request: gateway_pb2.GenerateRequest,
    completion: Completion,
    retry: RetrySettings,
) -> AsyncGenerator[Piece]:
    """The pieces of one session, resumed where they break off."""
    try:
        call = gateway_pb2_grpc.GatewayServiceStub(channels[0]).Generate(request)
        async with aclosing(_folded(completion, call, retry)) as found:
            async for piece in found:
                yield piece
        return
    except SlipstreamError as error:
        if not completion.session_id:
            raise
        broken = error
    async with aclosing(rest(channels, completion, retry, broken)) as found:
        async for piece in found:
            yield piece


def _seeded(request: gateway_pb2.GenerateRequest, seed: int) -> gateway_pb2.GenerateRequest:
    again = gateway_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.sampling.seed = seed
    return again


class _ReceivedOnce:
    """Lets each token and each character of an output pass once, however often the output is started again."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._text = ""
        self._character = 0
        """Characters received since the last start."""

    def fresh(self, piece: Piece) -> Piece | None:
        """Returns the new part of a piece; None for nothing new. Raises Aborted where the piece contradicts earlier
        ones."""
        if not piece.offset:
            self._character = 0
        tokens = self._tokens[piece.offset : piece.offset + len(piece.token_ids)]
        text = self._text[self._character : self._character + len(piece.text)]
        if list(piece.token_ids[: len(tokens)]) != tokens or not piece.text.startswith(text):
            raise Aborted(
                "the session was lost, and its restart gives another text; send the request again.",
                reason="SESSION_LOST",
            )
        self._character += len(piece.text)
        if not tokens and not text:
            fresh = piece
        else:
            logprobs = piece.logprobs[len(tokens) :]
            fresh = Piece(piece.offset + len(tokens), piece.token_ids[len(tokens) :], piece.text[len(text) :], logprobs)
        self._tokens += fresh.token_ids
        self._text += fresh.text
        return fresh if fresh.token_ids or fresh.text else None


async def rest(
    channels: Sequence[grpc.aio.Channel],
    completion: Completion,
    retry: RetrySettings | None = None,
    error: SlipstreamError | None = None,
) -> AsyncGenerator[Piece]:
    """The pieces that a completion lacks, of which at least the session id is known, from one gateway after the other.
    `error`, if given, interrupted it on the first one. Raises what `pieces` raises."""
    retry = retry or RetrySettings()
    patience = _Patience(completion, retry, len(channels))
    for channel in itertools.cycle(channels if error is None else [*channels[1:], channels[0]]):
        if error is not None:
            await patience.wait(error)
        patience.attempts += 1
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Resume(_missing(completion))
        try:
            async with aclosing(_folded(completion, call, retry)) as found:
                async for piece in found:
                    yield piece
            return
        except SlipstreamError as again:
            error = again


class _Patience:
    """Decides how long a completion that broke off is resumed."""

    def __init__(self, completion: Completion, retry: RetrySettings, gateways: int) -> None:
        self._completion = completion
        self._retry = retry
        self._gateways = gateways
        self._progress, self._seen = _now(), len(completion.token_ids)
        self._backoff = Backoff(0.05, MOST_PAUSE_S)
        self.attempts = 0
        """Since the last token."""

    async def wait(self, error: SlipstreamError) -> None:
        """Waits until the next attempt after an error. Raises the error where another attempt cannot help, or where
        there were enough."""
        if not isinstance(error, Unavailable) or (error.reason == SERVING_ENDED and self._gateways == 1):
            raise error
        if len(self._completion.token_ids) > self._seen:
            self._progress, self._seen, self.attempts = _now(), len(self._completion.token_ids), 0
            self._backoff.reset()
        if self.attempts >= self._gateways and _now() - self._progress > self._retry.resume_s:
            raise _broken_off(self._completion, error)
        if self.attempts:
            await self._backoff.wait()


def _missing(completion: Completion) -> gateway_pb2.ResumeRequest:
    return gateway_pb2.ResumeRequest(
        session_id=completion.session_id,
        offset=len(completion.token_ids),
        characters=len(completion.text) if completion.text and not completion.begins else None,
        revision=completion.started.revision if completion.started.HasField("revision") else None,
        mixed_arithmetic=completion.mixed_arithmetic,
    )


async def _folded(completion: Completion, call: Call, retry: RetrySettings) -> AsyncGenerator[Piece]:
    """Adds the events of a call to a completion and yields what is new. Raises the SlipstreamError behind a failed
    call."""
    try:
        while (event := await _next(call, retry.stall_s)) is not grpc.aio.EOF:
            begin = len(completion.token_ids)
            text = completion.take(event)
            tokens = tuple(completion.token_ids[begin:])
            if text or tokens:
                yield Piece(begin, tokens, text, event.delta.logprobs)
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
    if event is None:  # grpc.aio could not parse it; perhaps another gateway has this contract
        raise Unavailable("the gateway sent a message that is no protobuf of this contract.", reason="GARBLED")
    return event


def _trace_id(metadata: Iterable[tuple[str, Any]] | None) -> str:
    return next((value for key, value in metadata or () if key == TRACE_ID), "")


def _may_begin_again(error: SlipstreamError, retry: RetrySettings, lost_at: float | None, others: bool) -> bool:
    if lost_at is None:
        return retry.begin_anywhere and others and _unanswered(error)
    return _now() - lost_at <= retry.resume_s


def _unanswered(error: SlipstreamError) -> bool:
    """Whether no gateway answered: an error of a gateway always has a reason."""
    return isinstance(error, Unavailable) and error.reason == error.code.name


def explained_absence(error: SlipstreamError) -> SlipstreamError:
    """Names the problem where no gateway answered."""
    if _unanswered(error):
        sentence = f"no gateway answered: {_cause(error)}. Start `slipstream serve`, or name its address."
        return Unavailable(sentence, reason="NO_GATEWAY")
    return error


def _broken_off(completion: Completion, error: SlipstreamError) -> SlipstreamError:
    """The error, with the command that continues the text."""
    session, seen = completion.started.session_id, len(completion.token_ids)
    rest = f"`slipstream resume {session} --offset {seen}`, on this gateway or another, prints the rest"
    return Unavailable(f"the text broke off after {seen} tokens ({_cause(error)}); {rest}.", reason=error.reason)


def _cause(error: SlipstreamError) -> str:
    """The first line of the error's sentence, to stand in another sentence."""
    return error.message.splitlines()[0][:200].removesuffix(".") if error.message else "no answer"


def _now() -> float:
    return asyncio.get_running_loop().time()
