"""Threads that tenants share: turns, a free thread for others, errors, cancelled jobs and bounds."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

import pytest

from slipstream import tenants
from slipstream.errors import InvalidArgument, ResourceExhausted
from slipstream.tenants import FairThreads, tenant_id, tenant_salt

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
