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

CREDIT_PART = 0.25
"""Part of a session's credit that is sent at once. Below a half, so that a session whose client takes all tokens never
counts as short of credit (verifier_svc.session.Session.low_on_credit)."""

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


class StallCheck:
    """Calls `stuck` when a verifier that is waited for takes no steps for `stall_s` seconds, and does not wait for the
    client itself (`idle`). One timer serves all waits of a session: most end within milliseconds. When this process
    stood still, nothing could be received: the time begins anew."""

    def __init__(
        self, stall_s: float, steps: Callable[[], int], idle: Callable[[], bool], stuck: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._watch = StallWatch(stall_s, self._loop.time)
        self._steps, self._idle, self._stuck = steps, idle, stuck
        self._before = 0
        """Steps when the last check ended."""
        self._began = 0.0
        """Loop time of that."""
        self._timer: asyncio.TimerHandle | None = None
        self.waiting = False

    def begin_wait(self) -> None:
        self.waiting = True
        self._watch.note_progress()
        if self._timer is None:
            self._begin_check()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _begin_check(self) -> None:
        self._before, self._began = self._steps(), self._loop.time()
        self._timer = self._loop.call_later(self._watch.check_s, self._end_check)

    def _end_check(self) -> None:
        self._watch.note_check(self._began, 2 * self._watch.check_s)
        if not self.waiting or self._idle() or self._steps() != self._before:
            self._watch.note_progress()
        if self._watch.stalled():
            self._stuck()
        else:
            self._begin_check()


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
        """Tokens that the verifier may still generate."""
        self._owed = 0
        """Tokens that clients took and the verifier has not received as credit."""
        self._window = 0
        """Most tokens of credit that the session ever had, those owed included."""
        self._logprobs = False
        self._prompt_logprobs = 0
        """Log-probabilities of the prompt that the next round brings."""
        self._progressed = False
        self._received = Received()
        self._filled = asyncio.Event()
        self._stall: StallCheck | None = None

    def open(self, request: verifier_pb2.DecodeOpen) -> None:
        """Raises Unavailable or ResourceExhausted when the request cannot be sent, InvalidArgument when it is too
        large for any verifier's stream."""
        self._epoch = request.key.epoch
        self._length = len(request.prefix.token_ids)
        self._max_length = request.max_length
        self._credit = self._window = request.credit
        self._owed = 0
        self._logprobs = request.HasField("top_logprobs")
        self._prompt_logprobs = request.prefix.prompt_length - 1 if request.HasField("prompt_logprobs") else 0
        self._send(verifier_pb2.DecodeCommand(session=self.number, epoch=self._epoch, open=request))

    @property
    def out_of_credit(self) -> bool:
        """Whether the verifier waits for the client to take tokens."""
        return self._credit <= 0

    @property
    def suspect(self) -> bool:
        """Whether the session may have broken its stream: it was opened, and no round of it came. What a session
        breaks it breaks again at the same position, since its tokens depend on nothing else, and then before its first
        round."""
        return not self._progressed and self._received.end is None

    @property
    def undone(self) -> list[verifier_pb2.Round]:
        """Rounds that were received and not taken yet."""
        return self._received.rounds

    def add_credit(self, tokens: int) -> None:
        """A client took so many tokens. The verifier may generate as many more, and receives that in few messages: once
        they are CREDIT_PART of all credit."""
        self._owed += tokens
        self._window = max(self._window, self._credit + self._owed)
        if self._owed >= self._window * CREDIT_PART:
            owed, self._owed = self._owed, 0
            self._credit += owed
            self._send_command(verifier_pb2.DecodeCommand(credit=verifier_pb2.DecodeCredit(tokens=owed)))

    def attach_drafters(self, drafters: Iterable[verifier_pb2.DrafterAddress]) -> None:
        """Replace the session's drafters by these."""
        self._send_command(verifier_pb2.DecodeCommand(attach=verifier_pb2.DecodeAttach(drafters=drafters)))

    def close(self) -> None:
        """Let the verifier end the session (`verifier_svc.service.GatewayStream`), whose KV is free before its next
        step; it answers with a SessionEnd."""
        self._stop_checks()
        self._send_command(verifier_pb2.DecodeCommand(close=verifier_pb2.DecodeClose(length=self._length)))

    async def take_received(self) -> Received:
        """Everything received since the last call; waits until there is something."""
        await self._filled.wait()
        received, self._received = self._received, Received(end=self._received.end)
        if received.end is None:
            self._filled.clear()
        return received

    async def receive_until_stalled(self, steps: Callable[[], int], stall_s: float) -> Received:
        """As `take_received`. Ends the session when the verifier's `steps` stand still for `stall_s` seconds, a sixth
        more at most, unless it waits for the client."""
        if not self._filled.is_set():
            if self._stall is None:
                self._stall = StallCheck(stall_s, steps, lambda: self.out_of_credit, self._end_stalled)
            self._stall.begin_wait()
        try:
            return await self.take_received()
        finally:
            if self._stall is not None:
                self._stall.waiting = False

    def _end_stalled(self) -> None:
        self.end(SessionEnded(FINISH_REASON_ERROR, Unavailable("The verifier is stuck.", reason="STUCK")))

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
        self._stop_checks()

    def _fault(self, done: verifier_pb2.Round) -> str:
        if done.epoch > self._epoch or done.base_length > self._length:
            return "The verifier skipped a part of the session; it is opened again."
        if self._length + len(done.token_ids) > self._max_length:
            return "The verifier went beyond the session's length; it is opened again."
        if max(done.token_ids, default=0) >= self._vocabulary_size:
            return "The verifier sent a token outside its vocabulary; the session is opened again."
        if len(done.logprobs) != (len(done.token_ids) if self._logprobs else 0):
            return "The verifier sent log-probabilities that do not fit its tokens; the session is opened again."
        if len(done.prompt_logprobs) != self._prompt_logprobs:
            return "The verifier sent log-probabilities that do not fit the prompt; the session is opened again."
        if _impossible(done) or any(map(_impossible, done.drafters)):
            return "The verifier sent numbers of candidates that cannot be; the session is opened again."
        # A round starts with credit left and may overdraw it by its own tokens; nothing may follow.
        return "The verifier overdrew its credit; the session is opened again." if self._credit <= 0 else ""

    def _stop_checks(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None  # a ring would keep both until the next collection

    def _send_command(self, command: verifier_pb2.DecodeCommand) -> None:
        """A verifier that is gone is no error here: the session receives its end."""
        command.session, command.epoch = self.number, self._epoch
        with contextlib.suppress(SlipstreamError):
            self._send(command)


def _impossible(counted: verifier_pb2.Round | verifier_pb2.DrafterShare) -> bool:
    """Whether these numbers of candidates cannot be."""
    return not counted.accepted <= counted.drafted <= MOST_DRAFTED


def stream_lost(error: SlipstreamError, blame: float) -> SessionEnded:
    """The end of every session on a stream that broke: whatever broke it, sessions can go on elsewhere. `blame`: one
    loss, divided among the sessions that may have caused it."""
    return SessionEnded(FINISH_REASON_ERROR, Unavailable(error.message, reason="STREAM_LOST"), blame)
