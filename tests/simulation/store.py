"""The store that all gateways share: the embedded one behind a network, which may fail and forget."""

from __future__ import annotations

import asyncio
import contextvars
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_store import TOKEN_BYTES, unpack_tokens
from slipstream.errors import Unavailable
from tests.simulation.clock import Party
from tests.simulation.network import Network

TTL_S, LEASE_S = 3600.0, 1.0
REMEMBERED = 4
"""Writes that a failover can undo."""
NAMES = ("create", "append", "truncate", "restore", "takeover", "renew", "finish", "release", "read")
Operation = Callable[..., Coroutine[Any, Any, Any]]


class Server:
    """The store's own process."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.memory = MemoryBackend(network.loop.time)
        self.failing = 0.0
        """Share of operations that fail, before they are done or after it."""
        self.away = False
        self.longest: dict[str, int] = {}
        """Tokens that each session's log ever had."""
        self.lost: list[str] = []
        """Logs that became shorter or older by a write that may not do so."""
        self.may_cut: set[str] = set()
        """Sessions that their clients roll back."""
        self._claims: set[tuple[str, int, str]] = set()
        """Epochs that sessions ever had, and whose."""
        self.losses = 0
        """Times that it lost what it had acknowledged."""
        self._before: deque[Any] = deque(maxlen=REMEMBERED)

    def fail_over(self, lost: int) -> None:
        """To a replica that misses the last writes."""
        if lost and self._before:
            self.losses += 1
            self.memory.entries = _copied(self._before[-min(lost, len(self._before))])
            self._before.clear()
        self.network.note("failover", lost)
        self.network.loop.stir()

    def forget(self) -> None:
        """Restarted without its data."""
        self.losses += 1
        self.memory.entries.clear()
        self._before.clear()
        self.network.note("forgotten")

    def leases(self) -> int:
        return sum(entry.lease_until > self.network.loop.time() for entry in self.memory.entries.values())

    def logged(self, session: str) -> tuple[int, ...]:
        entry = self.memory.entries.get(session)
        return () if entry is None else unpack_tokens(bytes(entry.tokens))

    def carry_out(self, name: str, operation: Operation, answer: asyncio.Future[Any]) -> None:
        """Runs an operation that has arrived."""
        network = self.network
        fails = self.away or (self.failing > 0.0 and network.chance.random() < self.failing)
        before = not fails or self.away or network.chance.random() < 0.5
        if fails:
            network.counts["store operations failed"] += 1
        network.note("store", name, fails, before)
        error: BaseException | None = Unavailable("away.", reason="STORE_UNAVAILABLE") if fails else None
        value = None
        if not fails or not before:
            try:
                value = self._do(name, operation)
            except Exception as refusal:
                error = error or refusal
        network.after(network.delay_s(), partial(_settle, answer, value, error))

    def _do(self, name: str, operation: Operation) -> Any:
        if name != "read":
            self._before.append(_copied(self.memory.entries))
        self.network.loop.stir()
        before = self._sizes()
        try:
            operation().send(None)
        except StopIteration as done:
            return done.value
        finally:
            self._compare(name, before)
        raise AssertionError("the embedded store never waits")

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Epoch and tokens of each log."""
        return {
            name: (entry.epoch, len(entry.tokens) // TOKEN_BYTES - entry.prompt_length)
            for name, entry in self.memory.entries.items()
        }

    def _compare(self, operation: str, before: dict[str, tuple[int, int]]) -> None:
        for name, (epoch, length) in self._sizes().items():
            old_epoch, old_length = before.get(name, (0, 0))
            claim = name, epoch, self.memory.entries[name].owner
            # A takeover that was lost comes back whole, over what an earlier owner had put back meanwhile.
            again = operation == "restore" and claim in self._claims
            cut = epoch > old_epoch and (again or (operation in ("truncate", "restore") and name in self.may_cut))
            self._claims.add(claim)
            if epoch < old_epoch or (length < old_length and not cut):
                self.lost.append(f"{name} went from {old_length} tokens of epoch {old_epoch} to {length} of {epoch}")
            rolled_back = cut and name in self.may_cut  # else what clients saw was in the log that was lost
            self.longest[name] = length if rolled_back else max(length, self.longest.get(name, 0))


class Client:
    """One gateway's way to it: what it asked for is done even if it dies meanwhile."""

    def __init__(self, server: Server, party: Party, owner: str) -> None:
        self._server = server
        self._party = party
        self.owner = owner
        self._inner = MemoryStore(server.memory, owner=owner, ttl_s=TTL_S, lease_s=LEASE_S)

    def __getattr__(self, name: str) -> Operation:
        if name not in NAMES:
            raise AttributeError(name)
        return partial(self._ask, name)

    async def memory_usage(self) -> None:
        """It has no limit."""

    async def close(self) -> None:
        """Nothing to give up."""

    async def _ask(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._party.dead:
            raise asyncio.CancelledError
        network = self._server.network
        answer = network.loop.create_future()
        operation = partial(getattr(self._inner, name), *arguments, **options)
        arrives = partial(self._server.carry_out, name, operation, answer)
        network.loop.call_at(network.loop.time() + network.delay_s(), arrives, context=contextvars.Context())
        return await answer


def _copied(entries: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
    copies = ((name, replace(entry, tokens=bytearray(entry.tokens))) for name, entry in entries.items())
    return OrderedDict(copies)


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
