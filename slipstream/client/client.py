"""Asking gateways for a completion, and going on with it where it breaks off."""

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
"""Between two tries."""
Call = Any
"""A Generate or Resume call, whose type gRPC does not name."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Of a client, in seconds."""

    resume_s: float = 30.0
    """How long it tries to resume a completion of which nothing more comes: longer than the lease of a dead gateway. At
    least it asks every gateway once."""
    stall_s: float | None = None
    """A gateway that says nothing for so long is given up; None: it may think for as long as its connection lives."""


async def complete(
    line: grpc.aio.Channel,
    request: gateway_pb2.GenerateRequest,
    echo: Echo | None = None,
    others: Sequence[grpc.aio.Channel] = (),
    patience: RetrySettings | None = None,
    completion: Completion | None = None,
) -> Completion:
    """Run one request to its end, telling `echo` each piece of text. A completion that began and was interrupted is
    resumed, on the gateways of `others` too. Whoever gives a `completion` sees what there is of it when cancelled.

    A session that is lost, because its gateway died and the store lost its record, is begun again with the same seed,
    which says the same under the coupled rule.

    Raises the SlipstreamError that the gateway sent, Unavailable where it never began or did not go on, and Aborted
    where what was begun again says something else.
    """
    patience, hearing = patience or RetrySettings(), _Hearing(echo)
    completion = completion or Completion()
    lines, lost_at, backoff = [line, *others], None, Backoff(0.05, MOST_PAUSE_S)
    while True:
        try:
            await _fold(completion, gateway_pb2_grpc.GatewayServiceStub(lines[0]).Generate(request), hearing, patience)
            return completion
        except SlipstreamError as error:
            if not completion.started.session_id:
                # Only a session that is begun again may look for a gateway that is there.
                if lost_at is None or _now() - lost_at > patience.resume_s:
                    raise _explained(error) from error
                await backoff.wait()
            elif await _resumed(lines, completion, hearing, patience, error):
                return completion
            else:
                lost_at = _now()
                request = _seeded(request, completion.started.seed)
                completion.forget()
                hearing.again()
        lines = [*lines[1:], lines[0]]


async def _resumed(
    lines: Sequence[grpc.aio.Channel],
    completion: Completion,
    hearing: _Hearing,
    patience: RetrySettings,
    error: SlipstreamError,
) -> bool:
    """Whether there was anything to resume."""
    try:
        await resume(lines, completion, hearing, patience, error)
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


class _Hearing:
    """Echoes each piece of a text once, however often the text is begun again."""

    def __init__(self, echo: Echo | None) -> None:
        self._echo = echo
        self._said = ""
        self._at = 0
        """Characters that were heard since the last beginning."""

    def again(self) -> None:
        self._at = 0

    def __call__(self, piece: str) -> None:
        known = self._said[self._at : self._at + len(piece)]
        if not piece.startswith(known):
            raise Aborted("the session was lost, and its text is another one now; ask again.", reason="SESSION_LOST")
        self._at += len(piece)
        if fresh := piece[len(known) :]:
            self._said += fresh
            if self._echo is not None:
                self._echo(fresh)


async def resume(
    lines: Sequence[grpc.aio.Channel],
    completion: Completion,
    echo: Echo | None = None,
    patience: RetrySettings | None = None,
    error: SlipstreamError | None = None,
) -> None:
    """Go on with a completion of which the session's name is known, and whatever else of it was seen, on one gateway
    after the other. `error` interrupted it on the first one. Raises what `complete` raises."""
    patience = patience or RetrySettings()
    progress, seen, asked, backoff = _now(), len(completion.token_ids), 0, Backoff(0.05, MOST_PAUSE_S)
    for line in itertools.cycle(lines if error is None else [*lines[1:], lines[0]]):
        if error is not None:
            if not isinstance(error, Unavailable):
                raise error
            if len(completion.token_ids) > seen:
                progress, seen, asked = _now(), len(completion.token_ids), 0
                backoff.reset()
            if asked >= len(lines) and _now() - progress > patience.resume_s:
                raise _broken_off(completion, error)
            if asked:
                await backoff.wait()
        asked += 1
        request = gateway_pb2.ResumeRequest(
            session_id=completion.started.session_id,
            offset=seen,
            characters=len(completion.text) if completion.text and not completion.begins else None,
            revision=completion.started.revision if completion.started.HasField("revision") else None,
        )
        try:
            await _fold(completion, gateway_pb2_grpc.GatewayServiceStub(line).Resume(request), echo, patience)
            return
        except SlipstreamError as again:
            error = again


async def _fold(completion: Completion, call: Call, echo: Echo | None, patience: RetrySettings) -> None:
    """Raises the SlipstreamError behind a failed call."""
    try:
        while (event := await _next(call, patience.stall_s)) is not grpc.aio.EOF:
            text = completion.take(event)
            if echo is not None and text:
                echo(text)
        completion.trace_id = _trace_id(await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        completion.trace_id = _trace_id(error.trailing_metadata())
        raise error_of(error) from error
    except TimeoutError as error:
        raise Unavailable(f"the gateway said nothing for {patience.stall_s} s.", reason="STALLED") from error
    finally:
        call.cancel()
    if not completion.finished.reason:
        raise Unavailable("the gateway ended the stream without a word.", reason="STREAM_LOST")


async def _next(call: Call, timeout_s: float | None) -> Any:
    async with asyncio.timeout(timeout_s):
        event = await call.read()
    if event is None:  # grpc.aio could not parse it; perhaps another gateway speaks this contract
        raise Unavailable("the gateway said what is no protobuf of this contract.", reason="GARBLED")
    return event


def _trace_id(metadata: Iterable[tuple[str, Any]] | None) -> str:
    return next((value for key, value in metadata or () if key == TRACE_ID), "")


def _explained(error: SlipstreamError) -> SlipstreamError:
    """A gateway always gives its reason; without one nobody, or somebody else, was at the other end."""
    if isinstance(error, Unavailable) and error.reason == error.code.name:
        detail = error.message.splitlines()[0][:200] if error.message else "no answer"
        sentence = f"no gateway answered ({detail}); start `slipstream serve`, or name its address."
        return Unavailable(sentence, reason="NO_GATEWAY")
    return error


def _broken_off(completion: Completion, error: SlipstreamError) -> SlipstreamError:
    """What began can be gone on with, by whoever knows its name and how much of it there is."""
    session, seen = completion.started.session_id, len(completion.token_ids)
    detail = error.message.splitlines()[0][:200] if error.message else "no answer"
    rest = f"`slipstream resume {session} --offset {seen}`, on this gateway or another, says the rest"
    return Unavailable(f"the text broke off after {seen} tokens ({detail}); {rest}.", reason=error.reason)


def _now() -> float:
    return asyncio.get_running_loop().time()
