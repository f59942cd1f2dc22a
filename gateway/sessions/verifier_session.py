"""A session's place on one verifier: what it says to the verifier, and what it hears, in order, until it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from slipstream.concurrency import StallWatch
from slipstream.errors import Aborted, SlipstreamError, Unavailable
from slipstream.rpc import proto_conversion
from slipstream.v1 import verifier_pb2
from slipstream.v1.verifier_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP

Send = Callable[[verifier_pb2.DecodeCommand], None]

MOST_EVENTS = 64


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Why nothing more comes."""

    reason: verifier_pb2.FinishReason
    error: SlipstreamError | None = None


@dataclass(slots=True)
class Received:
    """What came since the last time; rounds are contiguous."""

    rounds: list[verifier_pb2.Round] = field(default_factory=list)
    events: list[verifier_pb2.DrafterEvent] = field(default_factory=list)
    """The latest MOST_EVENTS of them."""
    end: SessionEnded | None = None


class VerifierSession:
    """Rounds wait here for their session; the verifier's credit bounds how many."""

    def __init__(self, number: int, send: Send, vocabulary_size: int) -> None:
        self.number = number
        self._send = send
        self._vocabulary_size = vocabulary_size
        self._epoch = 0
        self._length = 0
        self._max_length = 0
        self._credit = 0
        self._logprobs = False
        self._news = Received()
        self._filled = asyncio.Event()

    def open(self, request: verifier_pb2.DecodeOpen) -> None:
        """Raises Unavailable or ResourceExhausted when the verifier cannot be told."""
        self._epoch = request.key.epoch
        self._length = len(request.prefix.token_ids)
        self._max_length = request.max_length
        self._credit = request.credit
        self._logprobs = request.HasField("top_logprobs")
        self._send(verifier_pb2.DecodeCommand(session=self.number, epoch=self._epoch, open=request))

    @property
    def spent(self) -> bool:
        """Whether it is the client that the verifier waits for."""
        return self._credit <= 0

    def credit(self, tokens: int) -> None:
        """The client took so many more tokens."""
        self._credit += tokens
        self._say(verifier_pb2.DecodeCommand(credit=verifier_pb2.DecodeCredit(tokens=tokens)))

    def attach(self, drafters: Iterable[verifier_pb2.DrafterAddress]) -> None:
        """The session's drafters are these from now on."""
        self._say(verifier_pb2.DecodeCommand(attach=verifier_pb2.DecodeAttach(drafters=drafters)))

    def close(self) -> None:
        self._say(verifier_pb2.DecodeCommand(close=verifier_pb2.DecodeClose()))

    async def take(self) -> Received:
        """Everything heard since the last take; waits until there is something."""
        await self._filled.wait()
        news, self._news = self._news, Received(end=self._news.end)
        if news.end is None:
            self._filled.clear()
        return news

    async def listen(self, steps: Callable[[], int], stall_s: float) -> Received:
        """As `take`. A verifier whose `steps` stand still for so long, while it is not the client that it waits for, is
        stuck: the seat ends. Where this process itself stood still, nothing could be heard: the time begins anew."""
        if self._filled.is_set():
            return await self.take()
        clock = asyncio.get_running_loop().time
        watch = StallWatch(stall_s, clock)
        while not watch.stalled():
            began, known = clock(), steps()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(watch.check_s):
                    return await self.take()
            watch.note_check(began, 2 * watch.check_s)
            if self.spent or steps() != known:
                watch.note_progress()
        self.end(SessionEnded(FINISH_REASON_ERROR, Unavailable("The verifier is stuck.", reason="STUCK")))
        return await self.take()

    def receive(self, done: verifier_pb2.Round) -> None:
        """A round. One that is late or repeated is dropped; one that cannot be right ends the seat."""
        stale = done.epoch < self._epoch or done.base_length < self._length
        if self._news.end is not None or stale:
            return
        if fault := self._fault(done):
            self.end(SessionEnded(FINISH_REASON_ERROR, Unavailable(fault, reason="PROTOCOL")))
            return
        self._length += len(done.token_ids)
        self._credit -= len(done.token_ids)
        self._news.rounds.append(done)
        self._filled.set()

    def hear(self, event: verifier_pb2.DrafterEvent) -> None:
        """A drafter was lost or came back."""
        if self._news.end is None and event.epoch >= self._epoch:
            self._news.events.append(event)
            del self._news.events[:-MOST_EVENTS]
            self._filled.set()

    def finished(self, message: verifier_pb2.SessionEnd) -> None:
        """The verifier ended the session; an end under a lower epoch is not this one's."""
        if message.epoch < self._epoch:
            return
        error: SlipstreamError | None = None
        if message.reason == FINISH_REASON_ERROR:
            error = proto_conversion.failure_from_proto(message.failure)
            if isinstance(error, Aborted):  # whose the session is, the log knows: it is asked before the next opening
                error = Unavailable(error.message, reason=error.reason)
        elif message.reason not in (FINISH_REASON_STOP, FINISH_REASON_LENGTH):
            error = Unavailable("The verifier gave the session up; retry.", reason="SESSION_CLOSED")
        self.end(SessionEnded(message.reason, error))

    def end(self, end: SessionEnded) -> None:
        """Nothing more comes; the first reason counts."""
        if self._news.end is None:
            self._news.end = end
        self._filled.set()

    def _fault(self, done: verifier_pb2.Round) -> str:
        if done.epoch > self._epoch or done.base_length > self._length:
            return "The verifier skipped a part of the session; it is opened again."
        if self._length + len(done.token_ids) > self._max_length:
            return "The verifier went beyond the session's length; it is opened again."
        if any(token >= self._vocabulary_size for token in done.token_ids):
            return "The verifier sent a token outside its vocabulary; the session is opened again."
        if len(done.logprobs) != (len(done.token_ids) if self._logprobs else 0):
            return "The verifier sent log-probabilities that do not fit its tokens; the session is opened again."
        # A round starts with credit left and may overdraw it by its own tokens; nothing may follow.
        return "The verifier overdrew its credit; the session is opened again." if self._credit <= 0 else ""

    def _say(self, command: verifier_pb2.DecodeCommand) -> None:
        """To a verifier that may be gone: then the session is told so by its end."""
        command.session, command.epoch = self.number, self._epoch
        with contextlib.suppress(SlipstreamError):
            self._send(command)


def lost(error: SlipstreamError) -> SessionEnded:
    """The end of every session on a stream that broke: whatever broke it, the session itself can go on elsewhere."""
    return SessionEnded(FINISH_REASON_ERROR, Unavailable(error.message, reason="STREAM_LOST"))
