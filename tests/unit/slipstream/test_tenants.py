"""Threads that tenants share: turns, a free thread for others, errors, cancelled jobs and bounds."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import tenants
from slipstream.errors import InvalidArgument, ResourceExhausted
from slipstream.tenants import FairThreads, TenantCache, tenant_id, tenant_salt

LIMIT_S = 60.0


def test_results_and_errors_come_back() -> None:
    threads = FairThreads(2, "test")

    def fail() -> None:
        raise InvalidArgument("no")

    assert threads.submit("a", divmod, 7, 2).result(LIMIT_S) == (3, 1)
    with pytest.raises(InvalidArgument):
        threads.submit("a", fail).result(LIMIT_S)
    assert threads.submit("a", threading.current_thread).result(LIMIT_S).name.startswith("test-")


def test_a_tenant_with_slow_work_never_delays_another_one() -> None:
    """As many jobs of one tenant as it likes, none of which ends before the other tenant's do."""
    threads, free = FairThreads(2, "test"), threading.Event()
    slow = [threads.submit("slow", free.wait, LIMIT_S) for _ in range(50)]
    quick = [threads.submit(f"tenant {number % 3}", int, number) for number in range(30)]
    assert [future.result(LIMIT_S) for future in quick] == list(range(30))
    assert not any(future.done() for future in slow)
    free.set()
    assert all(future.result(LIMIT_S) for future in slow)


def test_tenants_take_turns() -> None:
    threads, free, order = FairThreads(1, "test"), threading.Event(), list[str]()
    jobs: list[Future[object]] = [threads.submit("first", free.wait, LIMIT_S)]
    for tenant, count in {"a": 4, "b": 2, "c": 1}.items():
        jobs += [threads.submit(tenant, order.append, tenant) for _ in range(count)]
    free.set()
    wait(jobs, LIMIT_S)
    assert order == ["a", "b", "c", "a", "b", "a", "a"]


def test_a_cancelled_job_never_runs_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MOST_WAITING", 3)
    threads, began, free, ran = FairThreads(1, "test"), threading.Event(), threading.Event(), list[int]()
    running = threads.submit("a", lambda: began.set() or free.wait(LIMIT_S))
    assert began.wait(LIMIT_S)
    waiting = [threads.submit("a", ran.append, number) for number in range(3)]
    with pytest.raises(ResourceExhausted):
        threads.submit("a", ran.append, 3)
    threads.submit("b", ran.append, 9)
    assert waiting[1].cancel() and not running.cancel()
    free.set()
    wait(waiting, LIMIT_S)
    assert threads.submit("a", int).result(LIMIT_S) == 0
    assert sorted(ran) == [0, 2, 9]


def test_salts_and_names_of_tenants_differ() -> None:
    salts = [tenant_salt("one", asked) for asked in ("", "x", "y")]
    assert len({*salts, tenant_salt("two", "")}) == 4
    assert len({tenant_id("one"), tenant_id("two"), tenant_id("")}) == 3
    assert tenant_id("") == "" and "one" not in tenant_id("one")


def test_a_tenant_with_many_entries_evicts_only_its_own() -> None:
    cache: TenantCache[int, int] = TenantCache(8)
    for number in range(3):
        cache.put("few", number, number)
    for number in range(100):
        cache.put("many", number, number)
    assert [cache.get("few", number) for number in range(4)] == [0, 1, 2, None]
    assert [number for number in range(100) if cache.get("many", number) is not None] == list(range(95, 100))
    assert cache.get("many", 95) == 95  # used again, so 96 is the first to go
    cache.put("many", 100, 100)
    assert cache.get("many", 96) is None and cache.get("many", 95) == 95


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.booleans())), st.integers(1, 8))
def test_a_cache_keeps_as_many_as_it_may_and_no_tenant_loses_one_while_another_has_more(
    asked: list[tuple[str, int, bool]], most: int
) -> None:
    cache: TenantCache[int, object] = TenantCache(most)
    for tenant, key, put in asked:
        before = {name: [each for each in range(10) if each in cache._values.get(name, {})] for name in "abcd"}
        if not put:
            assert (cache.get(tenant, key) is not None) == (key in before[tenant])
            continue
        cache.put(tenant, key, object())
        after = {name: [each for each in range(10) if each in cache._values.get(name, {})] for name in "abcd"}
        before[tenant] = sorted({*before[tenant], key})
        lost = [name for name in "abcd" for each in before[name] if each not in after[name]]
        assert len(cache) <= most and len(lost) == max(0, sum(map(len, before.values())) - most)
        assert all(len(before[name]) == max(map(len, before.values())) for name in lost)
