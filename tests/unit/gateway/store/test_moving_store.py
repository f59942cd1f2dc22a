"""A store that goes away for a moment costs new requests a wait; one that stays away refuses them at once."""

from __future__ import annotations

import asyncio

import pytest

from gateway.store.measured import MeasuredStore
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_store import SessionRecord
from slipstream.errors import NotFound, Unavailable

PATIENCE_S = 5.0


class Moving(MemoryStore):
    """Away between two moments of the clock."""

    def __init__(self, from_s: float, until_s: float) -> None:
        super().__init__(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
        self.from_s, self.until_s = from_s, until_s
        self.now_s = 0.0
        self.tries = 0

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        self._check()
        return await super().read(session, start)

    async def create(self, record: SessionRecord) -> None:
        self._check()
        await super().create(record)

    async def takeover(self, session: str, *, force: bool = False, nonce: str = "") -> SessionRecord:
        self._check()
        return await super().takeover(session, force=force, nonce=nonce)

    def _check(self) -> None:
        self.tries += 1
        if self.from_s <= self.now_s < self.until_s:
            raise Unavailable("The store is away.", reason="STORE_UNAVAILABLE")


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeping moves the clock of the store that the test made last."""
    now = asyncio.sleep

    async def sleep(seconds: float) -> None:
        _made[-1].now_s += seconds
        await now(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)


_made: list[Moving] = []


def moving(from_s: float, until_s: float) -> tuple[Moving, MeasuredStore]:
    behind = Moving(from_s, until_s)
    _made.append(behind)
    return behind, MeasuredStore(behind, lambda: behind.now_s, PATIENCE_S)


async def test_requests_wait_while_the_store_moves() -> None:
    behind, store = moving(0.0, 2.0)
    await store.create(SessionRecord("s", 1, b"", 1, (1,)))
    behind.from_s, behind.until_s = behind.now_s, behind.now_s + 2.0
    assert (await store.read("s")).tokens == (1,)
    behind.from_s, behind.until_s = behind.now_s, behind.now_s + 2.0
    assert (await store.takeover("s")).epoch == 2


async def test_behind_the_patience_requests_are_refused_and_later_ones_at_once() -> None:
    behind, store = moving(0.0, 60.0)
    with pytest.raises(Unavailable):
        await store.read("s")
    assert behind.now_s == PATIENCE_S
    tries = behind.tries
    with pytest.raises(Unavailable):
        await store.create(SessionRecord("s", 1, b"", 1, (1,)))
    assert (behind.now_s, behind.tries) == (PATIENCE_S, tries + 1)
    behind.until_s = 0.0
    await store.create(SessionRecord("s", 1, b"", 1, (1,)))
    behind.from_s, behind.until_s = behind.now_s, behind.now_s + 1.0  # a later move is waited for again
    assert (await store.read("s")).tokens == (1,)


async def test_a_store_has_answered_once_it_was_there() -> None:
    behind, store = moving(0.0, 3.0)
    watching = asyncio.create_task(store.watch())
    await asyncio.wait_for(store.answered.wait(), 5.0)
    watching.cancel()
    assert behind.now_s >= 3.0
    with pytest.raises(NotFound):
        await store.read("s")
