"""A session store with metrics: durations and failures of operations, age of the oldest one under way. Logs when the
store goes away, for what reason, and when it is back."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gateway.store.session_store import SessionRecord, SessionStore
from slipstream.errors import SlipstreamError, Unavailable
from slipstream.telemetry import metrics
from slipstream.telemetry.metrics_collector import BoundedLabels

MOST_REASONS = 64
NO_SESSION = "nobody"
"""No session has this id."""
MOST_CAUSE = 200
"""Characters of the store client's error that are logged."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MeasuredStore:
    """Passes each operation on to the store behind it, and measures it."""

    def __init__(self, store: SessionStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._under_way: dict[int, float] = {}
        """When each operation under way began; the oldest first."""
        self._numbers = 0
        self._reasons = BoundedLabels(MOST_REASONS)
        self.seconds = metrics.STORE_SECONDS.histogram()
        self.errors: Counter[tuple[str, ...]] = Counter()
        """Failures by operation and reason."""
        self._away = False

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
            self._log_state(error)

    async def create(self, record: SessionRecord) -> None:
        await self._timed("create", self._store.create(record))

    async def append(self, session: str, epoch: int, start: int, tokens: Sequence[int]) -> None:
        await self._timed("append", self._store.append(session, epoch, start, tokens))

    async def truncate(
        self, session: str, epoch: int, length: int, params: bytes | None = None, tokens: Sequence[int] = ()
    ) -> None:
        await self._timed("truncate", self._store.truncate(session, epoch, length, params, tokens))

    async def restore(self, record: SessionRecord) -> None:
        await self._timed("restore", self._store.restore(record))

    async def takeover(self, session: str, *, force: bool = False, nonce: str = "") -> SessionRecord:
        return await self._timed("takeover", self._store.takeover(session, force=force, nonce=nonce))

    async def renew(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._timed("renew", self._store.renew(session, epoch, length))

    async def finish(self, session: str, epoch: int, outcome: bytes, length: int | None = None) -> None:
        await self._timed("finish", self._store.finish(session, epoch, outcome, length))

    async def release(self, session: str, epoch: int, length: int | None = None) -> None:
        await self._timed("release", self._store.release(session, epoch, length))

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        return await self._timed("read", self._store.read(session, start))

    async def close(self) -> None:
        await self._store.close()

    async def _timed(self, operation: str, doing: Awaitable[Result]) -> Result:
        self._numbers += 1
        number, began = self._numbers, self._clock()
        self._under_way[number] = began
        try:
            done = await doing
        except SlipstreamError as error:
            self.errors[operation, self._reasons(error.reason)] += 1
            self._log_state(error)
            raise
        else:
            self._log_state(None)
            return done
        finally:
            del self._under_way[number]
            self.seconds.labels(operation).observe(self._clock() - began)

    def _log_state(self, error: SlipstreamError | None) -> None:
        was_away, self._away = self._away, isinstance(error, Unavailable)
        if isinstance(error, Unavailable) and not was_away:
            cause = str(error.__cause__ or error).partition("\n")[0][:MOST_CAUSE]
            log.warning("the session store is away, and sessions wait or are refused: %s", cause)
        elif was_away and not self._away:
            log.info("the session store is back")
