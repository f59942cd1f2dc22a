"""Backoff, broadcast, stall watch and token bucket, on virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.clock import VirtualLoop, run
from slipstream.concurrency import CHECKS, Backoff, Broadcast, StallWatch, TokenBucket


def test_delays_double_up_to_their_bound_and_each_is_shortened_by_at_most_a_half() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0)
    for whole in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert whole / 2 <= backoff.next_delay_s() <= whole
    assert backoff.failures == 6
    backoff.reset()
    assert backoff.next_delay_s() <= 0.1


def test_a_peer_that_is_away_for_years_still_has_a_delay() -> None:
    backoff = Backoff(most_s=2.0)
    backoff.failures = 10**9
    assert 1.0 <= backoff.next_delay_s() <= 2.0


def test_retries_that_failed_together_are_spread_over_time() -> None:
    assert len({Backoff().next_delay_s() for _ in range(100)}) > 50


def test_a_backoff_waits_as_long_as_it_returns() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        await Backoff(first_s=4.0, most_s=4.0).wait()
        assert 2.0 <= clock() <= 4.1

    run(main())


def test_a_broadcast_wakes_every_task_that_waits_and_none_that_comes_later() -> None:
    async def main() -> None:
        changes, woken = Broadcast(), list[int]()

        async def wait(number: int) -> None:
            await changes.wait()
            woken.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0.0)
        changes.notify_all()
        late = asyncio.create_task(wait(3))
        await asyncio.sleep(1.0)
        assert sorted(woken) == [0, 1, 2] and not late.done()
        changes.notify_all()
        await asyncio.gather(*tasks, late)

    run(main())


@pytest.mark.parametrize(("progress_every_s", "stalls"), [(None, True), (5.0, False), (7.0, True)])
def test_a_peer_without_progress_for_the_limit_is_stalled(progress_every_s: float | None, stalls: bool) -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        watch = StallWatch(6.0, clock)
        due = progress_every_s or 1000.0
        while clock() < 30.0 and not watch.stalled():
            await run_check(watch)
            if clock() >= due:
                watch.note_progress()
                due += progress_every_s or 0.0
        assert watch.stalled() == stalls
        assert not stalls or clock() == pytest.approx(6.0)

    run(main())


@pytest.mark.parametrize("before_s", [0.5, 3.0, 5.5])
def test_the_stall_limit_restarts_after_this_process_was_suspended(before_s: float) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        watch = StallWatch(6.0, loop.time)

        def stand_still() -> None:
            loop.now += 600.0

        loop.call_at(before_s, stand_still)
        while loop.time() < 600.0:
            await run_check(watch)
            assert not watch.stalled()
        resumed = loop.time()
        while not watch.stalled():
            await run_check(watch)
        assert loop.time() - resumed == pytest.approx(6.0)

    run(main())


def test_a_peer_is_not_stalled_by_progress_that_was_not_due() -> None:
    now = 100.0
    watch = StallWatch(6.0, lambda: now, progress_at=0.0)
    assert watch.stalled() and not watch.stalled(due_since=95.0)


async def run_check(watch: StallWatch) -> None:
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(watch.check_s)
    watch.note_check(began, 2 * watch.check_s)
    assert watch.check_s == watch.limit_s / CHECKS


@given(
    per_minute=st.integers(1, 1000),
    asks=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 1000)), max_size=40),
)
def test_no_window_exceeds_a_minutes_limit_and_its_refill(per_minute: int, asks: list[tuple[float, int]]) -> None:
    now, taken = 0.0, 0
    bucket = TokenBucket(per_minute, 60.0, now)
    for pause, amount in asks:
        now += pause
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount)
            taken += amount
        assert taken <= per_minute + per_minute * now / 60.0 + 1e-6


@given(per_minute=st.integers(1, 1000), data=st.data())
def test_a_bucket_refills_within_exactly_the_wait_that_it_returns(per_minute: int, data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(1, per_minute)) for _ in range(2))
    bucket = TokenBucket(per_minute, 60.0, 0.0)
    assert bucket.wait_s(first, 0.0) == 0.0
    bucket.take(first)
    wait = bucket.wait_s(second, 0.0)
    assert wait == pytest.approx(max(0.0, (first + second - per_minute) * 60.0 / per_minute))
    if wait > 0.0:
        assert bucket.wait_s(second, wait * 0.99) > 0.0
    assert bucket.wait_s(second, wait * 1.001 + 1e-6) == 0.0


def test_a_drained_bucket_pays_its_debt_first() -> None:
    bucket = TokenBucket(10, 1.0, 0.0)
    bucket.drain(debt=10)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.1)
    assert bucket.wait_s(1, 1.11) == 0.0


def test_a_capacity_of_zero_is_without_limit() -> None:
    bucket = TokenBucket(0, 60.0, 0.0)
    bucket.take(10**9)
    assert bucket.fits(10**12) and bucket.wait_s(10**12, 0.0) == 0.0


def test_resizing_a_bucket_keeps_what_was_used() -> None:
    bucket = TokenBucket(10, 60.0, 0.0)
    bucket.take(8)
    bucket.resize(20)
    assert bucket.wait_s(12, 0.0) == 0.0 and bucket.wait_s(13, 0.0) > 0.0
    bucket.resize(5)
    assert bucket.wait_s(5, 0.0) == 0.0 and not bucket.fits(6)
