"""What feeds a session's story: its own run here, or the log of one that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.requests.resolved_request import ResolvedRequest
from gateway.sessions.context import GatewayContext
from gateway.sessions.entry import SessionEntry
from gateway.sessions.outcome import output_of
from gateway.sessions.ownership import SessionOwnership
from gateway.sessions.run import SessionRun
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord
from gateway.telemetry.request_stats import RequestStats
from slipstream.errors import Aborted

POLL_S = 0.2
"""How often the log of a session that another gateway runs is read while somebody follows it here."""


@dataclass(frozen=True, slots=True)
class OutputSource:
    name: str
    known: SessionEntry
    plan: ResolvedRequest
    stage: GatewayContext
    claims: SessionOwnership
    clock: Callable[[], float]
    arrived_at: float

    async def begin(self, log: SessionLog) -> None:
        """Of a new session. Raises what `follow` raises."""
        try:
            await self._run(log, self.arrived_at)
        except Aborted:  # somebody rolled it back, cancelled it or took it up
            await self.follow(await self._latest())

    async def follow(self, record: SessionRecord) -> None:
        """Tells what the log says, until the session ends or nobody else runs it: then it is taken up here. Raises what
        the store raises."""
        while self.known.hear(record) and not self.known.stopping:
            if self.claims.may_take(record):
                with contextlib.suppress(Aborted):  # somebody else was faster, or took it later
                    log = await self._take_up()
                    if log is not None:
                        await self._run(log, self.clock())  # what was told before was another's work
                    return
            await asyncio.sleep(POLL_S)
            record = await self._latest()

    async def _run(self, log: SessionLog, since: float) -> None:
        speculates = self.plan.max_draft_tokens > 0
        ledger = RequestStats(self.clock, since, speculates, self.stage.router.predicts)
        await self.known.run(SessionRun(self.name, self.plan, self.stage, log, self.known.story, ledger), log)

    async def _take_up(self) -> SessionLog | None:
        """The log of a session that is ours now; None where there is nothing to go on with."""
        async with self.claims.turn(self.name):
            record = await self.claims.take(self.name)
            log = self.claims.log(record)
            try:
                if self.known.hear(record):
                    # A store that failed over may have lost what it had acknowledged, and a client has seen.
                    await log.append(self.known.story.tokens[len(output_of(record)) :])
                    return log
            except BaseException:
                await log.release()
                raise
            await log.release()
            return None

    async def _latest(self) -> SessionRecord:
        """The record as it is now; what was told of it already is not read again."""
        told = (*self.plan.prompt, *self.known.story.tokens)
        tail = await self.claims.store.read(self.name, len(told))
        if tail.epoch == self.known.epoch and tail.start == len(told):
            return replace(tail, tokens=told + tail.tokens, start=0)
        return await self.claims.store.read(self.name)
