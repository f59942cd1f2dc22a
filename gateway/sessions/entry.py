"""A session that clients follow at this gateway: it runs here, or its entry follows the log of the gateway that runs it
and takes it up when that one is gone."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from gateway.requests.resolved_request import ResolvedRequest
from gateway.sessions.arithmetic_spans import same_request
from gateway.sessions.output_stream import OutputStream, rolled_back
from gateway.sessions.ownership import SessionOwnership, finished_of, output_of
from gateway.sessions.run import GatewayContext, SessionRun
from gateway.sessions.state import SessionLife, SessionState
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord
from slipstream.errors import Aborted
from slipstream.v1 import gateway_pb2

POLL_S = 0.2
"""Seconds between two looks at the log of a session that another gateway runs and a client follows here."""


@dataclass(slots=True, eq=False)
class SessionEntry:
    """A session that clients follow here, whichever gateway runs it. Its task fills `stream`."""

    id: str
    resolved: ResolvedRequest
    stream: OutputStream
    context: GatewayContext
    ownership: SessionOwnership
    params: bytes
    """The record's request as it was when the entry was made: a record with another one was rolled back since."""
    epoch: int
    """Epoch of the record when it was last read or written here."""
    task: asyncio.Task[None] | None = None
    run: SessionRun | None = None
    """Set while the session runs here."""
    mixed: bool | None = None
    """Value of `mixed_arithmetic` from a client that resumed the session here."""
    tokens_here: int = 0
    """Output tokens that were generated here."""
    life: SessionLife = field(default_factory=SessionLife)

    def leave(self) -> None:
        """End the task soon: the run closes the session on its verifier, where its KV is free before that
        one's next step, and releases it. Acts once, and interrupts no last writes."""
        if self.task is not None and not self.life.left:
            ending = self.life.state is SessionState.ENDING
            self.life.enter(SessionState.LEFT)
            if not ending:
                self.task.cancel()

    def choose_mixed(self, mixed: bool | None) -> None:
        """Take over a client's `mixed_arithmetic`; None: not set."""
        self.mixed = self.mixed if mixed is None else mixed
        if self.run is not None and self.mixed is not None:
            self.run.choose_mixed(self.mixed)

    async def run_new_session(self, log: SessionLog, arrived_at: float) -> None:
        """Run a session that was just created; follow it if another owner takes it. Raises what the store raises."""
        try:
            await self._run_session(log, arrived_at)
        except Aborted:  # rolled back, cancelled or taken up by another gateway
            await self.follow_log(await self._read_latest())

    async def follow_log(self, record: SessionRecord) -> None:
        """Copy the log to the stream until the session ends or has no owner; then take it up here. Raises what the
        store raises."""
        while self.apply_record(record) and not self.life.left:
            if self.ownership.may_take(record):
                with contextlib.suppress(Aborted):  # another gateway was faster, or took it later
                    log = await self._take_up()
                    if log is not None:  # what was generated before now is not this run's
                        await self._run_session(log, self.context.clock())
                    return
            await asyncio.sleep(POLL_S)
            record = await self._read_latest()

    async def _run_session(self, log: SessionLog, arrived_at: float) -> None:
        before = len(self.stream.tokens)
        self.run = SessionRun(self.resolved, self.context, log, self.stream, self.life, arrived_at)
        self.choose_mixed(self.mixed)
        try:
            await self.run.run()
        finally:
            self.run = None
            self.life.end_run()
            self.params = log.params
            self.tokens_here += len(self.stream.tokens) - before
            self.epoch = log.epoch_written

    async def _take_up(self) -> SessionLog | None:
        """The log of a session that this gateway owns now; None where the session ended or was rolled back."""
        async with self.ownership.lock(self.id):
            record = await self.ownership.take_over(self.id)
            log = self.ownership.open_log(record)
            try:
                if self.apply_record(record):
                    # A store that failed over may have lost what it had acknowledged, and a client has seen.
                    await log.append(self.stream.tokens[len(output_of(record)) :])
                    return log
            except BaseException:
                await log.release()
                raise
            await log.release()
            return None

    async def _read_latest(self) -> SessionRecord:
        """The record as it is now. Only the tokens behind the stream's are read, unless the log was cut."""
        seen = (*self.resolved.prompt, *self.stream.tokens)
        tail = await self.ownership.store.read(self.id, len(seen))
        if tail.epoch == self.epoch and tail.start == len(seen):
            return replace(tail, tokens=seen + tail.tokens, start=0)
        return await self.ownership.store.read(self.id)

    def apply_record(self, record: SessionRecord) -> bool:
        """Append to the stream what the record has more, or end it; whether the session goes on. A log that is shorter
        than the stream lost its end, which is generated again: the same tokens."""
        output, sent = record.tokens[record.prompt_length :], self.stream.tokens
        both = min(len(output), len(sent))
        same = next((index for index in range(both) if output[index] != sent[index]), both)
        if same < both or not same_request(record.params, self.params):
            revision = gateway_pb2.StoredRequest.FromString(record.params).revision
            self.stream.fail(rolled_back(revision, same))
            return False
        self.epoch, self.params = record.epoch, record.params
        if output[both:]:
            self.stream.append_tokens(output[both:])
        if record.outcome:
            finish_stream(self.stream, record)
        return not record.outcome


def finish_stream(stream: OutputStream, record: SessionRecord) -> None:
    """End the stream with the outcome of a record whose output the stream has."""
    stream.conclude()
    finished = finished_of(record)
    finished.output_tokens = min(finished.output_tokens, stream.transcript.carrying())
    stream.finish(finished)
