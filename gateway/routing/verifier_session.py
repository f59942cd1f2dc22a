"""A session on one verifier: the commands it sends, and the rounds and events it receives, in order, until it ends."""

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

MOST_DRAFTED = 1 << 16
"""Candidates of one round that are believed: far above what a step holds, and no sum of them overflows."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The reason why the verifier sends nothing more."""

    reason: verifier_pb2.FinishReason
    error: SlipstreamError | None = None
    blame: float = 1.0
    """The share of the loss, from 0 to 1, that this session may have caused."""


@dataclass(slots=True)
class Received:
    """Messages of the verifier since the last `take_received`; rounds are contiguous."""

    rounds: list[verifier_pb2.Round] = field(default_factory=list)
    events: list[verifier_pb2.DrafterEvent] = field(default_factory=list)
    """The latest MOST_EVENTS events."""
    end: SessionEnded | None = None


class VerifierSession:
    """Rounds wait here for the session's run; the verifier's credit bounds how many."""

    def __init__(self, number: int, send: Send, vocabulary_size: int) -> None:
        self.number = number
        self._send = send
        self._vocabulary_size = vocabulary_size
        self._epoch = 0
        self._length = 0
        self._max_length = 0
        self._credit = 0
        self._logprobs = False
        self._prompt_logprobs = 0
        """Log-probabilities of the prompt that the next round brings."""
        self._progressed = False
        self._received = Received()
        self._filled = asyncio.Event()

    def open(self, request: verifier_pb2.DecodeOpen) -> None:
        """Raises Unavailable or ResourceExhausted when the request cannot be sent, InvalidArgument when it is too
        large for any verifier's stream."""
        self._epoch = request.key.epoch
        self._length = len(request.prefix.token_ids)
        self._max_length = request.max_length
        self._credit = request.credit
        self._logprobs = request.HasField("top_logprobs")
        self._prompt_logprobs = request.prefix.prompt_length - 1 if request.HasField("prompt_logprobs") else 0
        self._send(verifier_pb2.DecodeCommand(session=self.number, epoch=self._epoch, open=request))

    @property
    def out_of_credit(self) -> bool:
        """Whether the verifier waits for the client to take tokens."""
        return self._credit <= 0

    @property
    def suspect(self) -> bool:
        """Whether it may have broken its stream: it was opened, and no round of it came. What a session breaks it
        breaks again at the same position, since its tokens depend on nothing else, and then before its first round."""
        return not self._progressed and self._received.end is None

    @property
    def undone(self) -> list[verifier_pb2.Round]:
        """Rounds that were received and not taken yet."""
        return self._received.rounds

    def add_credit(self, tokens: int) -> None:
        """Let the verifier generate so many more tokens: a client took as many."""
        self._credit += tokens
        self._send_command(verifier_pb2.DecodeCommand(credit=verifier_pb2.DecodeCredit(tokens=tokens)))

    def attach_drafters(self, drafters: Iterable[verifier_pb2.DrafterAddress]) -> None:
        """Replace the session's drafters by these."""
        self._send_command(verifier_pb2.DecodeCommand(attach=verifier_pb2.DecodeAttach(drafters=drafters)))

    def close(self) -> None:
        self._send_command(verifier_pb2.DecodeCommand(close=verifier_pb2.DecodeClose(length=self._length)))

    async def take_received(self) -> Received:
        """Everything received since the last call; waits until there is something."""
        await self._filled.wait()
        received, self._received = self._received, Received(end=self._received.end)
        if received.end is None:
            self._filled.clear()
        return received

    async def receive_until_stalled(self, steps: Callable[[], int], stall_s: float) -> Received:
        """As `take_received`. Ends the session when the verifier's `steps` stand still for `stall_s` seconds, unless it
        waits for the client. When this process itself stood still, nothing could be received: the time begins anew."""
        if self._filled.is_set():
            return await self.take_received()
        clock = asyncio.get_running_loop().time
        watch = StallWatch(stall_s, clock)
        while not watch.stalled():
            began, before = clock(), steps()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(watch.check_s):
                    return await self.take_received()
            watch.note_check(began, 2 * watch.check_s)
            if self.out_of_credit or steps() != before:
                watch.note_progress()
        self.end(SessionEnded(FINISH_REASON_ERROR, Unavailable("The verifier is stuck.", reason="STUCK")))
        return await self.take_received()

    def receive_round(self, done: verifier_pb2.Round) -> None:
        """A round that is late or repeated is dropped; one that cannot be right ends the session here."""
        stale = done.epoch < self._epoch or done.base_length < self._length
        if self._received.end is not None or stale:
            return
        if fault := self._fault(done):
            self.end(SessionEnded(FINISH_REASON_ERROR, Unavailable(fault, reason="PROTOCOL")))
            return
        self._length += len(done.token_ids)
        self._credit -= len(done.token_ids)
        self._progressed = True
        self._prompt_logprobs = 0
        self._received.rounds.append(done)
        self._filled.set()

    def receive_drafter_event(self, event: verifier_pb2.DrafterEvent) -> None:
        """A drafter was lost or came back."""
        if self._received.end is None and event.epoch >= self._epoch:
            self._received.events.append(event)
            del self._received.events[:-MOST_EVENTS]
            self._filled.set()

    def receive_end(self, message: verifier_pb2.SessionEnd) -> None:
        """The verifier ended the session; an end under a lower epoch belongs to an earlier opening."""
        if message.epoch < self._epoch:
            return
        error: SlipstreamError | None = None
        if message.reason == FINISH_REASON_ERROR:
            error = proto_conversion.failure_from_proto(message.failure)
            if isinstance(error, Aborted):  # the log decides on the owner, before the next opening
                error = Unavailable(error.message, reason=error.reason)
        elif message.reason not in (FINISH_REASON_STOP, FINISH_REASON_LENGTH):
            error = Unavailable("The verifier gave the session up; retry.", reason="SESSION_CLOSED")
        self.end(SessionEnded(message.reason, error))

    def end(self, end: SessionEnded) -> None:
        """Receive nothing more; the first reason counts."""
        if self._received.end is None:
            self._received.end = end
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
        if len(done.prompt_logprobs) != self._prompt_logprobs:
            return "The verifier sent log-probabilities that do not fit the prompt; the session is opened again."
        counted = [(done.accepted, done.drafted), *((share.accepted, share.drafted) for share in done.drafters)]
        if any(accepted > drafted or drafted > MOST_DRAFTED for accepted, drafted in counted):
            return "The verifier sent numbers of candidates that cannot be; the session is opened again."
        # A round starts with credit left and may overdraw it by its own tokens; nothing may follow.
        return "The verifier overdrew its credit; the session is opened again." if self._credit <= 0 else ""

    def _send_command(self, command: verifier_pb2.DecodeCommand) -> None:
        """A verifier that is gone is no error here: the session receives its end."""
        command.session, command.epoch = self.number, self._epoch
        with contextlib.suppress(SlipstreamError):
            self._send(command)


def stream_lost(error: SlipstreamError, blame: float) -> SessionEnded:
    """The end of every session on a stream that broke: whatever broke it, sessions can go on elsewhere. `blame`: one
    loss, divided among the sessions that may have caused it."""
    return SessionEnded(FINISH_REASON_ERROR, Unavailable(error.message, reason="STREAM_LOST"), blame)
