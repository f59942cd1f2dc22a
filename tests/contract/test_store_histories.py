"""Random histories of two owners: both stores answer alike, as a plain model does, and keep what the contract promises.

The clock is the test's. Leases last 25 s, records 95 s, and time passes in steps of 10 s: nothing ever lapses at the
moment it is asked for, so the few milliseconds that a real server needs decide nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.store.session_store import KEPT_TAKEOVERS, SessionRecord
from slipstream.errors import NotFound
from tests.support.stores import PROMPT, World, connected, memory_world, outcome, redis_world

LEASE_S, TTL_S = 25.0, 95.0


@dataclass
class Model:
    """The contract in a few lines, for one session."""

    now: float = 0.0
    epoch: int = 1
    owner: str = "a"
    params: bytes = b"p0"
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    outcome: bytes = b""
    lease_until: float = LEASE_S
    given_up: bool = False
    expires_at: float = TTL_S
    takeovers: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.now < self.expires_at

    @property
    def leased(self) -> bool:
        return not self.given_up and self.now < self.lease_until

    def refused(self, owner: str, epoch: int, raises: bool = False) -> str:
        if not self.alive:
            return "NotFound"
        if epoch < self.epoch or (epoch == self.epoch and owner != self.owner):
            return "Aborted"
        return "OutOfRange" if epoch > self.epoch + (raises and owner == self.owner) else ""

    def own(self, owner: str, epoch: int, given_up: bool = False) -> str:
        self.given_up = given_up or (self.given_up and epoch == self.epoch)
        self.epoch, self.owner = epoch, owner
        self.lease_until, self.expires_at = self.now + LEASE_S, self.now + TTL_S
        return "OK"

    def append(self, owner: str, epoch: int, start: int, tokens: list[int]) -> str:
        if word := self.refused(owner, epoch, raises=not tokens):
            return word
        repeat = epoch == self.epoch and self.tokens[start : start + len(tokens)] == tokens
        if start > len(self.tokens) or (start < len(self.tokens) and not repeat):
            return "OutOfRange"
        if tokens and start == len(self.tokens):
            self.tokens, self.outcome = self.tokens + tokens, b""
        return self.own(owner, epoch)

    def truncate(self, owner: str, epoch: int, length: int, params: bytes | None) -> str:
        if word := self.refused(owner, epoch, raises=True):
            return word
        wanted = (self.tokens[:length], self.params if params is None else params)
        if not len(PROMPT) <= length <= len(self.tokens):
            return "OutOfRange"
        if epoch == self.epoch and wanted != (self.tokens, self.params):
            return "OutOfRange"
        if epoch > self.epoch:
            self.outcome = b""
        self.tokens, self.params = wanted
        return self.own(owner, epoch)

    def restore(self, owner: str, epoch: int, tokens: list[int], params: bytes) -> str:
        whole = [*PROMPT, *tokens]
        if not self.alive:
            self.epoch, self.owner, self.given_up, self.takeovers = epoch - 1, owner, False, []
        elif self.refused(owner, epoch) == "Aborted":
            return "Aborted"
        if epoch > self.epoch or params != self.params or self.tokens[: len(whole)] != whole:
            self.tokens, self.params, self.outcome = whole, params, b""
        return self.own(owner, epoch)

    def takeover(self, owner: str, nonce: str) -> str:
        if not self.alive:
            return "NotFound"
        if nonce in self.takeovers[-KEPT_TAKEOVERS:]:
            return "OK" if owner == self.owner else "Aborted"
        if self.leased and owner != self.owner:
            return "Aborted"
        self.takeovers.append(nonce)
        return self.own(owner, self.epoch + 1)

    def renew(self, owner: str, epoch: int, length: int | None, given_up: bool = False) -> str:
        if word := self.refused(owner, epoch):
            return word
        return "OutOfRange" if (length or 0) > len(self.tokens) else self.own(owner, epoch, given_up)

    def release(self, owner: str, epoch: int, length: int | None) -> str:
        return self.renew(owner, epoch, length, given_up=True)

    def finish(self, owner: str, epoch: int, outcome: bytes, length: int | None) -> str:
        word = self.release(owner, epoch, length)
        if word == "OK":
            self.outcome = outcome
        return word


def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), st.booleans(), *arguments)


# Owners, epochs and positions are drawn from where the record is, so that most histories get far.
AHEAD = st.sampled_from([0, 0, 0, 1, 1, 2, -1])
AT = st.sampled_from([0, 0, 0, -1, -2, 1])
LENGTHS = st.none() | st.integers(0, 8)
PARAMS = st.sampled_from([b"p0", b"p1"])
TOKENS = st.lists(st.integers(0, 1), max_size=3)
STEPS = st.one_of(
    step("append", AHEAD, AT, TOKENS),
    step("truncate", AHEAD, AT, st.none() | PARAMS),
    step("truncate", st.just(1), AT, st.none() | PARAMS),
    step("restore", AHEAD, TOKENS, PARAMS),
    step("takeover"),
    st.tuples(st.just("repeat"), st.integers(1, 10)),
    step("renew", AHEAD, LENGTHS),
    step("finish", AHEAD, st.binary(min_size=1, max_size=2), LENGTHS),
    step("release", AHEAD, LENGTHS),
    st.tuples(st.just("advance"), st.integers(1, 4).map(lambda tens: 10.0 * tens)),
)


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=st.lists(STEPS, min_size=10, max_size=25))
def test_both_stores_do_what_a_plain_model_does(
    loop: asyncio.Runner, redis_url: str, steps: list[tuple[Any, ...]]
) -> None:
    async def compare() -> None:
        async with connected(redis_url) as client:
            await Run(memory_world()).run(steps)
            await Run(redis_world(client)).run(steps)

    loop.run(compare())


class Run:
    """One history on one store, next to the model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.made = world.record(params=b"p0")
        self.model = Model()
        self.taken: list[tuple[str, str]] = []
        """Owner and nonce of the takeovers that were done, the latest last."""
        self.stores = {owner: world.store(owner, ttl_s=TTL_S, lease_s=LEASE_S) for owner in "ab"}

    async def run(self, steps: list[tuple[Any, ...]]) -> None:
        await self.stores["a"].create(self.made)
        for name, *arguments in steps:
            if name == "advance":
                self.model.now += arguments[0]
                await self.world.advance(*arguments)
            elif name == "repeat":  # of a script that was given up as lost, and runs after all
                if len(self.taken) >= arguments[0]:
                    await self.do("takeover", *self.taken[-arguments[0]])
            else:
                await self.do(name, *self.absolute(name, *arguments))

    def absolute(self, name: str, other: bool, *arguments: Any) -> tuple[Any, ...]:
        """Whether it is another than the owner, and epochs and positions, are told from where the record is."""
        owner = "ab".replace(self.model.owner, "") if other else self.model.owner
        if name == "takeover":
            return owner, f"{len(self.taken):032x}"
        epoch = max(1, self.model.epoch + arguments[0])
        if name in ("append", "truncate"):
            return owner, epoch, max(0, len(self.model.tokens) + arguments[1]), *arguments[2:]
        return owner, epoch, *arguments[1:]

    async def do(self, name: str, owner: str, *arguments: Any) -> None:
        before = await self.look()
        expected = getattr(self.model, name)(owner, *arguments)
        assert await outcome(self.call(name, owner, *arguments)) == expected
        after = await self.look()
        self.check(before, after, name, owner, expected)
        if expected == "OK" and name == "takeover" and (owner, *arguments) not in self.taken:
            self.taken.append((owner, *arguments))
        if expected == "OK":  # the reply was lost, and the write comes again
            assert await outcome(self.call(name, owner, *arguments)) == "OK"
            assert await self.look() == after

    def call(self, name: str, owner: str, *arguments: Any) -> Any:
        if name == "restore":
            epoch, tokens, params = arguments
            return self.stores[owner].restore(replace(self.made, epoch=epoch, tokens=(*PROMPT, *tokens), params=params))
        if name == "takeover":
            return self.stores[owner].takeover(self.made.id, nonce=arguments[0])
        return getattr(self.stores[owner], name)(self.made.id, *arguments)

    async def look(self) -> SessionRecord | None:
        """The record, which is what the model says."""
        model = self.model
        try:
            read = await self.stores["a"].read(self.made.id)
        except NotFound:
            assert not model.alive
            return None
        assert (read.epoch, read.owner, list(read.tokens), read.params, read.outcome, read.leased) == (
            model.epoch,
            model.owner,
            model.tokens,
            model.params,
            model.outcome,
            model.leased,
        )
        return read

    @staticmethod
    def check(before: SessionRecord | None, after: SessionRecord | None, name: str, owner: str, word: str) -> None:
        """What the contract promises, whatever the model says."""
        if before is None or after is None:
            return
        if word != "OK":
            assert after == before and after.leased == before.leased
        if after.owner != before.owner:
            assert name in ("takeover", "restore")
        if after.owner != before.owner or after.tokens[: before.length] != before.tokens:
            assert after.epoch > before.epoch or name == "restore"
        assert after.epoch >= before.epoch
        if name == "takeover" and before.leased and before.owner != owner:
            assert word == "Aborted"
        if name == "takeover" and before.owner == owner and word == "OK":
            assert after.owner == owner
