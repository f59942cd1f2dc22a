"""One contract, both stores: memory and a real Redis must refuse, repeat and forget alike."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.store import SessionStore
from gateway.store.memory import Memory, MemoryStore
from gateway.store.record import Record, pack, unpack
from gateway.store.redis import RedisStore, connect
from slipstream.errors import Aborted, FailedPrecondition, NotFound, OutOfRange, SlipstreamError, Unavailable

PROMPT = (5, 0, 4_294_967_295)


@dataclass
class World:
    """One kind of store, seen by several owners."""

    open: Callable[[str, float, float], SessionStore]
    advance: Callable[[float], Awaitable[None]]

    def store(self, owner: str = "a", *, ttl_s: float = 60.0, lease_s: float = 60.0) -> SessionStore:
        return self.open(owner, ttl_s, lease_s)


def memory_world() -> World:
    now = [1000.0]
    memory = Memory(clock=lambda: now[0])

    async def advance(seconds: float) -> None:
        now[0] += seconds

    return World(lambda owner, ttl, lease: MemoryStore(memory, owner=owner, ttl_s=ttl, lease_s=lease), advance)


def redis_world(client: Redis) -> World:
    return World(lambda owner, ttl, lease: RedisStore(client, owner=owner, ttl_s=ttl, lease_s=lease), asyncio.sleep)


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        yield memory_world()
        return
    client = connect(request.getfixturevalue("redis_url"))
    yield redis_world(client)
    await client.aclose()


def record(**changes: object) -> Record:
    fresh = Record(id=uuid.uuid4().hex, epoch=1, params=b"\x00params\xff", prompt_length=len(PROMPT), tokens=PROMPT)
    return replace(fresh, **changes)  # type: ignore[arg-type]


async def test_what_is_created_is_read_back(world: World) -> None:
    store, made = world.store(), record()
    await store.create(made)
    assert await store.read(made.id) == replace(made, owner="a")


async def test_creating_again_is_harmless_and_another_session_of_that_id_is_refused(world: World) -> None:
    store, made = world.store(), record()
    await store.create(made)
    await store.create(made)
    for other in (replace(made, tokens=(1, 2, 3)), replace(made, params=b"x")):
        with pytest.raises(FailedPrecondition):
            await store.create(other)
    with pytest.raises(FailedPrecondition):
        await world.store("b").create(made)
    assert (await store.read(made.id)).tokens == PROMPT


async def test_every_operation_on_an_unknown_session_is_not_found(world: World) -> None:
    store = world.store()
    operations = (
        store.append("none", 1, 0, [1]),
        store.truncate("none", 1, 1),
        store.takeover("none"),
        store.finish("none", 1, b"x"),
        store.read("none"),
    )
    for operation in operations:
        with pytest.raises(NotFound):
            await operation


async def test_appends_are_contiguous_and_repeats_change_nothing(world: World) -> None:
    store, made = world.store(), record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8])
    await store.append(made.id, 1, 5, [9])
    for start, tokens in ((3, [7, 8]), (5, [9]), (4, [8, 9]), (6, []), (2, [])):
        await store.append(made.id, 1, start, tokens)
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8, 9)


@pytest.mark.parametrize(("start", "tokens"), [(4, [1]), (2, [1]), (2, [PROMPT[2], 7]), (0, [6]), (9, [])])
async def test_gaps_overlaps_and_contradictions_are_out_of_range(world: World, start: int, tokens: list[int]) -> None:
    store, made = world.store(), record()
    await store.create(made)
    with pytest.raises(OutOfRange):
        await store.append(made.id, 1, start, tokens)
    assert (await store.read(made.id)).tokens == PROMPT


async def test_truncation_raises_the_epoch_and_fences_the_old_one(world: World) -> None:
    store, made = world.store(), record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8, 9])
    for _ in range(2):
        await store.truncate(made.id, 2, 4)
    with pytest.raises(Aborted):
        await store.append(made.id, 1, 4, [8])
    await store.append(made.id, 2, 4, [1])
    read = await store.read(made.id)
    assert (read.epoch, read.tokens) == (2, (*PROMPT, 7, 1))


@pytest.mark.parametrize(("epoch", "length"), [(1, 4), (2, 2), (2, 6), (2, 0)])
async def test_truncation_needs_a_higher_epoch_and_a_length_between_prompt_and_end(
    world: World, epoch: int, length: int
) -> None:
    store, made = world.store(), record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8])
    with pytest.raises(OutOfRange):
        await store.truncate(made.id, epoch, length)
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8)


async def test_a_live_lease_refuses_a_takeover_and_a_lapsed_one_fences_the_former_owner(world: World) -> None:
    first, second, made = world.store("a", lease_s=60.0), world.store("b"), record()
    await first.create(made)
    with pytest.raises(Aborted):
        await second.takeover(made.id)
    careless = world.store("a", lease_s=0.0)
    await careless.append(made.id, 1, 3, [7])
    taken = await second.takeover(made.id)
    assert (taken.epoch, taken.owner, taken.tokens) == (2, "b", (*PROMPT, 7))
    for epoch in (1, 2):  # the same number does not make the former owner the owner again
        with pytest.raises(Aborted):
            await first.append(made.id, epoch, 4, [8])
        with pytest.raises(Aborted):
            await first.truncate(made.id, epoch, 4)
        with pytest.raises(Aborted):
            await first.finish(made.id, epoch, b"x")


async def test_finishing_keeps_the_outcome_and_gives_the_lease_up(world: World) -> None:
    store, made = world.store("a"), record()
    await store.create(made)
    for _ in range(2):
        await store.finish(made.id, 1, b"\x08\x01")
    assert (await store.read(made.id)).outcome == b"\x08\x01"
    taken = await world.store("b").takeover(made.id)
    assert (taken.epoch, taken.outcome) == (2, b"")


async def test_records_expire_after_their_last_write(world: World) -> None:
    store, made = world.store(ttl_s=0.05), record()
    await store.create(made)
    await world.advance(0.2)
    with pytest.raises(NotFound):
        await store.read(made.id)
    await store.create(made)


async def test_of_many_writers_exactly_one_extends_the_log(world: World) -> None:
    store, made = world.store(), record()
    await store.create(made)

    async def write(token: int) -> bool:
        try:
            await store.append(made.id, 1, 3, [token])
        except OutOfRange:
            return False
        return True

    won = await asyncio.gather(*(write(token) for token in range(16)))
    assert won.count(True) == 1
    assert (await store.read(made.id)).tokens == (*PROMPT, won.index(True))


async def test_of_many_takeovers_each_gets_its_own_epoch(world: World) -> None:
    made = record()
    await world.store("a", lease_s=0.0).create(made)
    stores = [world.store(f"g{number}", lease_s=0.0) for number in range(8)]
    taken = await asyncio.gather(*(store.takeover(made.id) for store in stores))
    assert (await stores[0].read(made.id)).epoch == 1 + len(taken)


def test_packing_is_little_endian_and_lossless() -> None:
    assert pack([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert unpack(pack(PROMPT)) == PROMPT


async def test_every_key_in_redis_has_a_time_to_live(redis_url: str) -> None:
    client = connect(redis_url)
    store, made = redis_world(client).store(ttl_s=60.0), record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7])
    await store.truncate(made.id, 2, 3)
    for key in (f"{{{made.id}}}:meta", f"{{{made.id}}}:tokens"):
        assert 0 < await client.pttl(key) <= 60_000
    await client.aclose()


async def test_scripts_are_loaded_again_when_the_server_forgot_them(redis_url: str) -> None:
    client = connect(redis_url)
    store, made = redis_world(client).store(), record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7])
    await client.script_flush()
    await store.append(made.id, 1, 4, [8])
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8)
    await client.aclose()


async def test_a_store_that_is_down_is_typed_unavailable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        client = connect(f"redis://127.0.0.1:{probe.getsockname()[1]}")
        store = redis_world(client).store()
        for operation in (store.create(record()), store.append("x", 1, 0, [1]), store.read("x")):
            with pytest.raises(Unavailable) as caught:
                await operation
            assert caught.value.reason == "STORE_UNAVAILABLE"
        await client.aclose()


async def test_a_store_that_accepts_and_never_answers_is_typed_unavailable_in_bounded_time() -> None:
    gone = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        client = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", reply_timeout_s=0.05)
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable):
                await redis_world(client).store().append("x", 1, 0, [1])
        await client.aclose()
        gone.set()


@dataclass
class Model:
    """The contract in a few lines, for one session of two owners whose leases have always lapsed."""

    epoch: int = 1
    owner: str = "a"
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    outcome: bytes = b""

    def fenced(self, owner: str, epoch: int) -> bool:
        return epoch < self.epoch or (epoch == self.epoch and owner != self.owner)

    def append(self, owner: str, epoch: int, start: int, tokens: list[int]) -> str:
        if self.fenced(owner, epoch):
            return "Aborted"
        if start != len(self.tokens) and self.tokens[start : start + len(tokens)] != tokens:
            return "OutOfRange"
        if start > len(self.tokens):
            return "OutOfRange"
        self.tokens[start:] = self.tokens[start:] or tokens
        self.epoch, self.owner = epoch, owner
        return "OK"

    def truncate(self, owner: str, epoch: int, length: int) -> str:
        if self.fenced(owner, epoch):
            return "Aborted"
        if not len(PROMPT) <= length <= len(self.tokens) or (length < len(self.tokens) and epoch == self.epoch):
            return "OutOfRange"
        del self.tokens[length:]
        self.epoch, self.owner = epoch, owner
        return "OK"

    def takeover(self, owner: str) -> str:
        self.epoch, self.owner, self.outcome = self.epoch + 1, owner, b""
        return "OK"

    def finish(self, owner: str, epoch: int, outcome: bytes) -> str:
        if self.fenced(owner, epoch):
            return "Aborted"
        self.epoch, self.owner, self.outcome = epoch, owner, outcome
        return "OK"


OWNERS = st.sampled_from(["a", "b"])
EPOCHS = st.integers(1, 4)
STEPS = st.one_of(
    st.tuples(st.just("append"), OWNERS, EPOCHS, st.integers(0, 8), st.lists(st.integers(0, 1), max_size=3)),
    st.tuples(st.just("truncate"), OWNERS, EPOCHS, st.integers(0, 8)),
    st.tuples(st.just("takeover"), OWNERS),
    st.tuples(st.just("finish"), OWNERS, EPOCHS, st.binary(min_size=1, max_size=2)),
)


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=20))
def test_both_stores_do_what_a_plain_model_does(
    loop: asyncio.Runner, redis_url: str, steps: list[tuple[object, ...]]
) -> None:
    loop.run(compare_with_model(redis_url, steps))


async def compare_with_model(redis_url: str, steps: list[tuple[object, ...]]) -> None:
    client = connect(redis_url)
    try:
        for world in (memory_world(), redis_world(client)):
            model, made = Model(), record()
            stores = {owner: world.store(owner, lease_s=0.0) for owner in ("a", "b")}
            await stores["a"].create(made)
            for name, owner, *arguments in steps:
                expected = getattr(model, str(name))(owner, *arguments)
                assert await outcome(getattr(stores[str(owner)], str(name))(made.id, *arguments)) == expected
                read = await stores["a"].read(made.id)
                assert (read.epoch, read.owner, list(read.tokens), read.outcome) == (
                    model.epoch,
                    model.owner,
                    model.tokens,
                    model.outcome,
                )
    finally:
        await client.aclose()


async def outcome(operation: Awaitable[object]) -> str:
    try:
        await operation
    except SlipstreamError as error:
        return type(error).__name__
    return "OK"
