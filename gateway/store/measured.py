"""A session store with metrics: durations and failures of operations, age of the oldest one under way, and the server's
memory. New requests wait for a store that has just gone away. Logs when it goes away, for what reason, and when it is
back; and that it may drop sessions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from uuid import uuid4

from gateway.store.session_store import SessionRecord, SessionStore, StoreMemory
from slipstream.errors import FailedPrecondition, SlipstreamError, Unavailable
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import BoundedLabels

MOST_REASONS = 64
NO_SESSION = "no-session"
"""No session has this id."""
MOST_CAUSE = 200
"""Characters of the store client's error that are logged."""
WATCH_S = 15.0
"""Seconds between two looks at the server's memory."""
ANSWER_S = 1.0
"""Seconds for which `answers` waits for the store."""
RETRY_S = 1.0
"""Seconds until a gateway that may not start without an answer asks again."""
MOVING_S = 0.5
"""Seconds between two tries of a request that waits."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MeasuredStore:
    """Passes each operation on to the store behind it, and measures it."""

    def __init__(
        self,
        store: SessionStore,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = 0.0,
        kind: str = "memory",
    ) -> None:
        """A request that needs the store is refused once it has been away for `patience_s`. `kind`: `memory`, or the
        scheme of its address."""
        self.kind = kind
        self._store = store
        self._clock = clock
        self._patience_s = patience_s
        self._under_way: dict[int, float] = {}
        """Seconds of the clock at which each operation under way began, by its number; the oldest first."""
        self._numbers = 0
        self._reasons = BoundedLabels(MOST_REASONS)
        self.seconds = metrics.STORE_SECONDS.histogram()
        self.errors: Counter[tuple[str, ...]] = Counter()
        """Failures by operation and reason."""
        self.memory: StoreMemory | None = None
        """The server's memory at the last look; None where the store is away or has no server."""
        self.answered = asyncio.Event()
        """Set once the store has answered; a wrong address never does."""
        self._away_since: float | None = None
        """Seconds of the clock at which the store failed first since it answered last; None while it answers."""
        self._worry = ""
        """Last logged warning of the server's memory."""

    @property
    def owner(self) -> str:
        return self._store.owner

    @property
    def lag_s(self) -> float:
        """Age of the oldest operation under way."""
        return self._clock() - next(iter(self._under_way.values()), self._clock())

    async def greet(self) -> None:
        """Log a store that is away before the first session needs it. Never raises."""
        try:
            await self._store.read(NO_SESSION)
        except SlipstreamError as error:
            self._note(error)

    async def answers(self) -> bool:
        """Whether the store answers now, within ANSWER_S."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.greet()
        except TimeoutError:
            return False
        return self._away_since is None

    async def watch(self) -> None:
        """Greet the store until it answers, then keep `memory` up to date. Never ends."""
        await self.greet()
        while not self.answered.is_set():
            await asyncio.sleep(RETRY_S)
            await self.greet()
        while True:
            await self.look()
            await asyncio.sleep(WATCH_S)

    async def look(self) -> None:
        """Read `memory`, and log once what is wrong with it. Never raises."""
        try:
            self.memory = await self._store.memory_usage()
        except SlipstreamError:
            self.memory = None
            return
        worry = _worry(self.memory)
        if worry and worry != self._worry:
            log.warning("%s", worry)
        self._worry = worry

    async def require_no_eviction(self) -> None:
        """Wait until the store answers. Raises FailedPrecondition where it may evict sessions, or that is unknown."""
        while True:
            with suppress(Unavailable):
                worry = _worry(await self._store.memory_usage())
                if worry:
                    raise FailedPrecondition(worry, reason="STORE_EVICTS")
                return
            await asyncio.sleep(RETRY_S)

    async def create(self, record: SessionRecord) -> None:
        await self._patient("create", partial(self._store.create, record))

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        await self._timed("append", self._store.append(session, epoch, start, tokens))

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        await self._timed("truncate", self._store.truncate(session, epoch, length, params, tokens))

    async def restore(self, record: SessionRecord) -> None:
        await self._timed("restore", self._store.restore(record))

    async def takeover(self, session: str, *, force: bool = False, nonce: str = "") -> SessionRecord:
        takeover = partial(self._store.takeover, session, force=force, nonce=nonce or uuid4().hex)
        return await self._patient("takeover", takeover)

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._timed("renew", self._store.renew(session, epoch, length))

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        await self._timed("finish", self._store.finish(session, epoch, outcome, length))

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._timed("release", self._store.release(session, epoch, length))

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        return await self._patient("read", partial(self._store.read, session, start))

    async def delete(self, session: str) -> None:
        await self._timed("delete", self._store.delete(session))

    async def memory_usage(self) -> StoreMemory | None:
        return await self._store.memory_usage()

    async def close(self) -> None:
        await self._store.close()

    async def _patient(self, operation: str, execute: Callable[[], Awaitable[Result]]) -> Result:
        """Tries the operation again while the store has not been away for long: it may be moving to another machine."""
        while True:
            try:
                return await self._timed(operation, execute())
            except Unavailable:
                if self._away_since is None or self._clock() - self._away_since >= self._patience_s:
                    raise
            await asyncio.sleep(MOVING_S)

    async def _timed(self, operation: str, doing: Awaitable[Result]) -> Result:
        self._numbers += 1
        number, began = self._numbers, self._clock()
        self._under_way[number] = began
        try:
            done = await doing
        except SlipstreamError as error:
            self.errors[operation, self._reasons(error.reason)] += 1
            self._note(error)
            raise
        else:
            self._note(None)
            return done
        finally:
            del self._under_way[number]
            self.seconds.labels(operation).observe(self._clock() - began)

    def _note(self, error: SlipstreamError | None) -> None:
        """Records whether the store answered, and logs when that changes. `error`: of an operation that failed."""
        if isinstance(error, Unavailable):
            if self._away_since is None:
                self._away_since = self._clock()
                cause = str(error.__cause__ or error).partition("\n")[0][:MOST_CAUSE]
                log.warning("the session store is away, and sessions wait or are refused: %s", cause)
            return
        self.answered.set()
        if self._away_since is not None:
            self._away_since = None
            log.info("the session store is back")


def _worry(memory: StoreMemory | None) -> str:
    """Sentence for a fault of the server's policy, with the remedy; empty if there is none."""
    if memory is None or (memory.policy and not memory.evicts):
        return ""
    if memory.evicts:
        return (
            f"The session store drops sessions when its memory is full (maxmemory-policy {memory.policy}); set it to "
            "noeviction."
        )
    return "The session store does not report whether it evicts sessions: permit the command INFO, and set noeviction."
