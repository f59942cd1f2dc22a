"""One contract, both stores: memory and a real Redis must refuse, repeat and forget alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.store.session_store import pack_tokens, unpack_tokens
from slipstream.errors import Aborted, FailedPrecondition, NotFound, OutOfRange
from tests.support.stores import PROMPT, World, connected, memory_world, outcome, redis_world


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        yield memory_world()
        return
    async with connected(request.getfixturevalue("redis_url")) as client:
        yield redis_world(client)


async def test_a_created_record_is_read_back_unchanged(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    assert await store.read(made.id) == replace(made, owner="a")


async def test_creating_again_is_harmless_and_another_session_of_that_id_is_refused(world: World) -> None:
    store, made = world.store(), world.record()
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
        store.renew("none", 1),
        store.finish("none", 1, b"x"),
        store.release("none", 1),
        store.read("none"),
    )
    for operation in operations:
        with pytest.raises(NotFound):
            await operation


async def test_a_deleted_record_is_gone_whatever_its_owner_and_its_id_is_free_again(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    for _ in range(2):
        await world.store("b").delete(made.id)
    for operation in (store.read(made.id), store.append(made.id, 1, len(PROMPT), [1])):
        with pytest.raises(NotFound):
            await operation
    await store.create(made)  # the id is free again
    assert (await store.read(made.id)).tokens == PROMPT


async def test_appends_are_contiguous_and_repeats_change_nothing(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8])
    await store.append(made.id, 1, 5, [9])
    for start, tokens in ((3, [7, 8]), (5, [9]), (4, [8, 9]), (6, []), (2, [])):
        await store.append(made.id, 1, start, tokens)
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8, 9)


@pytest.mark.parametrize(
    ("start", "tokens"), [(4, [1]), (2, [1]), (2, [PROMPT[2], 7]), (0, [6]), (9, []), (-1, [PROMPT[2]]), (-1, [])]
)
async def test_gaps_overlaps_and_contradictions_are_out_of_range(world: World, start: int, tokens: list[int]) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    with pytest.raises(OutOfRange):
        await store.append(made.id, 1, start, tokens)
    assert (await store.read(made.id)).tokens == PROMPT


async def test_a_tail_is_read_from_where_it_is_asked_for(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8, 9])
    for start, tokens in ((0, (*PROMPT, 7, 8, 9)), (4, (8, 9)), (6, ())):
        read = await store.read(made.id, start)
        assert (read.start, read.tokens, read.length) == (start, tokens, 6)
    await store.truncate(made.id, 2, 4)
    read = await store.read(made.id, 6)  # a follower that is ahead of a log that was cut
    assert (read.start, read.tokens, read.length) == (4, (), 4)


async def test_truncation_raises_the_epoch_and_fences_the_old_one(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8, 9])
    for _ in range(2):
        await store.truncate(made.id, 2, 4)
    with pytest.raises(Aborted):
        await store.append(made.id, 1, 4, [8])
    await store.append(made.id, 2, 4, [1])
    read = await store.read(made.id)
    assert (read.epoch, read.tokens, read.params) == (2, (*PROMPT, 7, 1), made.params)


@pytest.mark.parametrize(("epoch", "length"), [(1, 4), (2, 2), (2, 6), (2, 0), (3, 4)])
async def test_truncation_needs_the_next_epoch_and_a_length_between_prompt_and_end(
    world: World, epoch: int, length: int
) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8])
    with pytest.raises(OutOfRange):
        await store.truncate(made.id, epoch, length)
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8)


async def test_truncation_may_replace_the_params_and_its_repeat_must_be_the_same(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    for _ in range(2):
        await store.truncate(made.id, 2, 3, b"another seed")
    for other in (made.params, b""):
        with pytest.raises(OutOfRange):
            await store.truncate(made.id, 2, 3, other)
    assert (await store.read(made.id)).params == b"another seed"
    await store.truncate(made.id, 3, 3, b"")
    assert (await store.read(made.id)).params == b""


async def test_a_sessions_own_client_may_force_a_takeover(world: World) -> None:
    first, second, made = world.store("a", lease_s=60.0), world.store("b"), world.record()
    await first.create(made)
    taken = await second.takeover(made.id, force=True)
    assert (taken.epoch, taken.owner) == (2, "b")
    with pytest.raises(Aborted):
        await first.append(made.id, 1, len(made.tokens), [7])
    with pytest.raises(Aborted):
        await first.takeover(made.id)


async def test_a_live_lease_refuses_a_takeover_and_a_lapsed_one_fences_the_former_owner(world: World) -> None:
    first, second, made = world.store("a", lease_s=20.0), world.store("b"), world.record()
    await first.create(made)
    await first.append(made.id, 1, 3, [7])
    await world.advance(15)
    with pytest.raises(Aborted):
        await second.takeover(made.id)
    await world.advance(10)
    assert not (await second.read(made.id)).leased
    taken = await second.takeover(made.id)
    assert taken == await second.read(made.id)
    assert (taken.epoch, taken.owner, taken.tokens, taken.leased) == (2, "b", (*PROMPT, 7), True)
    for epoch in (1, 2):  # the same number does not make the former owner the owner again
        for operation in (
            first.append(made.id, epoch, 4, [8]),
            first.truncate(made.id, epoch, 4),
            first.renew(made.id, epoch),
            first.finish(made.id, epoch, b"x"),
            first.release(made.id, epoch),
            first.restore(replace(made, epoch=epoch)),
        ):
            assert await outcome(operation) == "Aborted"
    assert await second.read(made.id) == taken


async def test_renewal_keeps_lease_and_record_and_changes_nothing_else(world: World) -> None:
    store, made = world.store("a", lease_s=20.0, ttl_s=30.0), world.record()
    await store.create(made)
    for _ in range(4):
        await world.advance(15)
        await store.renew(made.id, 1)
    read = await store.read(made.id)
    assert read == replace(made, owner="a")
    assert 15.0 < read.lease_s <= 20.0
    with pytest.raises(Aborted):
        await world.store("b").takeover(made.id)


async def test_a_released_session_may_be_taken_over_at_once_and_its_lease_does_not_come_back(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7])
    for _ in range(2):
        await store.release(made.id, 1)
    for late in (store.append(made.id, 1, 3, [7]), store.renew(made.id, 1), store.restore(replace(made, owner="a"))):
        await late
    read = await store.read(made.id)
    assert (read.leased, read.outcome, read.tokens) == (False, b"", (*PROMPT, 7))
    assert (await world.store("b").takeover(made.id)).epoch == 2
    with pytest.raises(Aborted):
        await store.release(made.id, 1)
    assert (await store.read(made.id)).leased


async def test_a_session_taken_back_by_its_former_owner_is_leased_again(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    await store.release(made.id, 1)
    assert (await store.takeover(made.id)).leased


async def test_finishing_keeps_the_outcome_and_gives_the_lease_up(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    for _ in range(2):
        await store.finish(made.id, 1, b"\x08\x01")
    read = await store.read(made.id)
    assert (read.outcome, read.leased) == (b"\x08\x01", False)


@pytest.mark.parametrize("change", ["append", "truncate"])
async def test_a_finished_session_may_be_continued_and_keeps_its_outcome_until_it_changes(
    world: World, change: str
) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    await store.finish(made.id, 1, b"\x08\x01")
    other = world.store("b")
    taken = await other.takeover(made.id)
    assert (taken.epoch, taken.outcome) == (2, b"\x08\x01")
    await other.append(made.id, 2, 3, [])
    assert (await other.read(made.id)).outcome == b"\x08\x01"
    if change == "append":
        await other.append(made.id, 2, 3, [7])
    else:
        await other.truncate(made.id, 3, 3)
    assert (await other.read(made.id)).outcome == b""


async def test_a_log_is_cut_and_edited_at_once_and_a_repeat_does_nothing(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7, 8, 9])
    for _ in range(2):
        await store.truncate(made.id, 2, 4, b"p", [5, 6])
        read = await store.read(made.id)
        assert (read.tokens, read.params, read.epoch) == ((*PROMPT, 7, 5, 6), b"p", 2)
    for length, edit in ((4, [5]), (4, [5, 7]), (4, []), (3, [7, 5, 5])):
        with pytest.raises(OutOfRange):
            await store.truncate(made.id, 2, length, b"p", edit)
    await store.append(made.id, 2, 6, [1])
    with pytest.raises(OutOfRange):  # too late to be repeated
        await store.truncate(made.id, 2, 4, b"p", [5, 6])
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 5, 6, 1)


async def test_a_late_repeat_does_not_undo_a_finish(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    await store.append(made.id, 1, 3, [7])
    await store.truncate(made.id, 2, 4, b"p")
    await store.finish(made.id, 2, b"\x08\x01")
    await store.append(made.id, 2, 3, [7])
    await store.truncate(made.id, 2, 4, b"p")
    await store.restore(replace(made, epoch=2, params=b"p"))
    read = await store.read(made.id)
    assert (read.outcome, read.tokens, read.leased) == (b"\x08\x01", (*PROMPT, 7), False)


async def test_a_log_that_lost_tokens_is_neither_renewed_nor_ended(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    for operation in (store.finish(made.id, 1, b"x", 4), store.release(made.id, 1, 4), store.renew(made.id, 1, 4)):
        with pytest.raises(OutOfRange):
            await operation
    read = await store.read(made.id)
    assert (read.outcome, read.leased) == (b"", True)
    await store.finish(made.id, 1, b"x", 3)


async def test_a_write_ahead_of_the_stored_epoch_proves_a_loss(world: World) -> None:
    store, made = world.store("a"), world.record()
    await store.create(made)
    for operation in (
        store.append(made.id, 2, 3, [7]),
        store.append(made.id, 3, 3, []),
        store.append(made.id, 2, 2, []),
        store.truncate(made.id, 3, 3),
        store.renew(made.id, 2),
        store.finish(made.id, 2, b"x"),
        store.release(made.id, 2),
    ):
        with pytest.raises(OutOfRange):
            await operation
    for operation in (world.store("b").append(made.id, 2, 3, []), world.store("b").truncate(made.id, 2, 3)):
        with pytest.raises(OutOfRange):
            await operation
    assert await store.read(made.id) == replace(made, owner="a")
    await store.append(made.id, 2, 3, [])  # its owner may raise it by one
    assert (await store.read(made.id)).epoch == 2


async def test_a_lost_record_is_restored_whole_by_its_owner_and_a_late_repeat_changes_nothing(world: World) -> None:
    store, made = world.store("b"), world.record()
    whole = replace(made, epoch=3, tokens=(*PROMPT, 7, 8), params=b"another seed")
    for _ in range(2):
        await store.restore(whole)  # of all of it
        assert await store.read(made.id) == replace(whole, owner="b")
    await store.append(made.id, 3, 5, [9])
    await store.restore(whole)  # late: what came after it stays
    assert (await store.read(made.id)).tokens == (*PROMPT, 7, 8, 9)


async def test_a_restoration_under_a_higher_epoch_replaces_what_is_there(world: World) -> None:
    first, second, made = world.store("a"), world.store("b"), world.record()
    await first.create(made)
    await first.append(made.id, 1, 3, [6, 6, 6])
    whole = replace(made, epoch=2, tokens=(*PROMPT, 7, 8), params=b"another seed")
    await second.restore(whole)
    assert await second.read(made.id) == replace(whole, owner="b")
    with pytest.raises(Aborted):
        await first.restore(made)


async def test_records_expire_after_their_last_write(world: World) -> None:
    store, made = world.store(ttl_s=30), world.record()
    await store.create(made)
    await world.advance(20)
    await store.append(made.id, 1, 3, [7])
    await world.advance(20)
    assert (await store.read(made.id)).length == 4
    await world.advance(20)
    with pytest.raises(NotFound):
        await store.read(made.id)
    await store.create(made)


async def test_of_many_writers_exactly_one_extends_the_log(world: World) -> None:
    store, made = world.store(), world.record()
    await store.create(made)
    won = await asyncio.gather(*(outcome(store.append(made.id, 1, 3, [token])) for token in range(16)))
    assert sorted(won) == ["OK"] + ["OutOfRange"] * 15
    assert (await store.read(made.id)).tokens == (*PROMPT, won.index("OK"))


async def test_of_many_takeovers_each_gets_its_own_epoch_and_record(world: World) -> None:
    made = world.record()
    await world.store("a", lease_s=0.0).create(made)
    stores = [world.store(f"g{number}", lease_s=0.0) for number in range(8)]
    taken = await asyncio.gather(*(store.takeover(made.id) for store in stores))
    assert sorted(record.epoch for record in taken) == list(range(2, 10))
    assert [record.owner for record in taken] == [f"g{number}" for number in range(8)]


def test_packing_is_little_endian_and_lossless() -> None:
    assert pack_tokens([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"
    assert unpack_tokens(pack_tokens(PROMPT)) == PROMPT


async def test_a_late_repeat_of_a_takeover_fences_no_owner(world: World) -> None:
    first, second, made = world.store("a", lease_s=60.0), world.store("b"), world.record()
    nonce, other = "1" * 32, "2" * 32
    await first.create(made)
    taken = await second.takeover(made.id, force=True, nonce=nonce)
    assert await second.takeover(made.id, force=True, nonce=nonce) == taken
    await second.truncate(made.id, 3, 3, b"p", [7])
    await second.takeover(made.id, force=True, nonce=nonce)
    await second.append(made.id, 3, 4, [8])  # its owner is not fenced
    await first.takeover(made.id, force=True, nonce=other)
    assert await outcome(second.takeover(made.id, force=True, nonce=nonce)) == "Aborted"
    await first.append(made.id, 4, 5, [9])  # nor is whoever owns it now
    read = await first.read(made.id)
    assert (read.epoch, read.owner, read.tokens) == (4, "a", (*PROMPT, 7, 8, 9))
