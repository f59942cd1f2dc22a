"""Tenants' work in processes of its own: turns, bounds, charges, and what becomes of jobs whose client left, whose
process ended, or which take too much."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.tenant import Tenant, TenantLimits
from gateway.work import tenant_work
from gateway.work.frames import JobFrame
from gateway.work.processes import ProcessSource
from gateway.work.tenant_work import KINDS, TenantWork
from slipstream.errors import Internal, InvalidArgument, ResourceExhausted, SlipstreamError, Unavailable
from tests.support.fleet import until

ALICE, BOB = Tenant("alice", TenantLimits()), Tenant("bob", TenantLimits())
WAITING, ECHO, MISBEHAVING = "chat", "encode", "decode"
MOST_BYTES = 1000


@pytest.fixture
async def work() -> AsyncIterator[TenantWork]:
    made = TenantWork(ProcessSource("tests.support.scripted_jobs", lambda: JobFrame({}, b"set up, ")), 2, MOST_BYTES)
    yield made
    await made.close()


def doing(job: Coroutine[Any, Any, JobFrame]) -> asyncio.Task[JobFrame]:
    return asyncio.create_task(job)


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_one_tenants_jobs_hold_up_no_other_tenants(work: TenantWork, tmp_path: Path) -> None:
    """None of the first tenant's ends before all of the other's have."""
    free = str(tmp_path / "free").encode()
    slow = [doing(work.run(ALICE, WAITING, free)) for _ in range(5)]
    await until(lambda: work.waiting[WAITING] == 4)
    for number in range(20):
        assert (await doing(work.run(BOB, ECHO, b"%d" % number))).body == b"set up, %d" % number
    assert not any(task.done() for task in slow) and work.waiting[WAITING] == 4
    Path(os.fsdecode(free)).touch()
    await asyncio.gather(*slow)
    assert not work.waiting.total() and not work.failures


async def test_waiting_work_of_a_tenant_is_bounded_and_leaves_room_for_another_one(
    work: TenantWork, tmp_path: Path
) -> None:
    free = str(tmp_path / "free").encode()
    first = doing(work.run(ALICE, WAITING, free))
    await until(lambda: not work.waiting[WAITING] and bool(work._serving))
    second = doing(work.run(ALICE, ECHO, bytes(MOST_BYTES)))
    await until(lambda: work.waiting[ECHO] == 1)
    with pytest.raises(ResourceExhausted) as refused:
        await doing(work.run(ALICE, ECHO, b"x"))
    assert refused.value.reason == "WORK" and work.failures[ECHO, "refused"] == 1
    assert len((await doing(work.run(BOB, ECHO, bytes(MOST_BYTES)))).body) > MOST_BYTES
    Path(os.fsdecode(free)).touch()
    await asyncio.gather(first, second)
    assert len((await doing(work.run(ALICE, ECHO, bytes(MOST_BYTES)))).body) > MOST_BYTES


async def test_a_job_whose_client_left_is_not_done(work: TenantWork, tmp_path: Path) -> None:
    """Neither one that waits, nor one that is being done: its process goes, and the next job has another."""
    never = str(tmp_path / "never").encode()
    running = doing(work.run(ALICE, WAITING, never))
    await until(lambda: bool(work._serving) and not work.waiting[WAITING])
    waiting = doing(work.run(ALICE, WAITING, never))
    await until(lambda: work.waiting[WAITING] == 1)
    for task in (waiting, running):
        task.cancel()
        await asyncio.wait([task])
    assert not work.waiting[WAITING]
    assert (await doing(work.run(ALICE, ECHO, b"more"))).body == b"set up, more"
    await until(lambda: not work._serving)
    assert work.failures == {(WAITING, "disconnected"): 1}


@pytest.mark.parametrize(
    ("job", "error", "reason"),
    [
        (b"refuse", InvalidArgument, "NO"),
        (b"fail", Internal, "INTERNAL"),
        (b"die", Unavailable, "WORK_LOST"),
        (b"grow", ResourceExhausted, "WORK"),
        (b"spin", InvalidArgument, "WORK_TOO_COSTLY"),
    ],
)
async def test_a_job_that_fails_ends_typed_and_harms_no_other(
    work: TenantWork,
    job: bytes,
    error: type[SlipstreamError],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tenant_work, "CPU_S", 1)
    with pytest.raises(error) as failed:
        await doing(work.run(ALICE, MISBEHAVING, job))
    assert failed.value.reason == reason
    assert "somebody" not in caplog.text + failed.value.message
    assert (await doing(work.run(ALICE, ECHO, b"more"))).body == b"set up, more"


async def test_processes_that_ended_meanwhile_are_replaced_and_all_end_with_the_gateway(work: TenantWork) -> None:
    """An idle one, and the one that forks."""
    seen: list[dict[str, Any]] = []
    for name in ("pid", "parent", "pid"):
        seen.append((await doing(work.run(ALICE, ECHO, b""))).head)
        os.kill(seen[-1][name], signal.SIGKILL)
        await until(lambda name=name: not alive(seen[-1][name]))  # type: ignore[misc]
        if name == "parent":
            os.kill(seen[-1]["pid"], signal.SIGKILL)  # else it would serve on
            await until(lambda: not alive(seen[-1]["pid"]))
    seen.append((await doing(work.run(ALICE, ECHO, b""))).head)
    assert len({each["pid"] for each in seen}) == 4
    assert seen[0]["parent"] == seen[1]["parent"] != seen[2]["parent"]
    await work.close()
    await until(lambda: not any(alive(each[name]) for each in seen for name in ("pid", "parent")))


async def test_work_is_charged_by_its_bytes_before_it_is_done(work: TenantWork) -> None:
    poor = Tenant("poor", TenantLimits(tokens_per_minute=3), lambda: 0.0)
    await doing(work.run(poor, ECHO, bytes(2 * KINDS[ECHO])))
    with pytest.raises(ResourceExhausted) as refused:
        await doing(work.run(poor, ECHO, bytes(KINDS[ECHO] + 1)))
    assert refused.value.reason == "KEY_TOKENS"
    await doing(work.run(poor, ECHO, bytes(KINDS[ECHO])))


async def test_a_process_is_replaced_behind_a_large_job(work: TenantWork, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the memory, and the low priority."""
    monkeypatch.setattr(tenant_work, "LARGE_BYTES", 100)
    heads = [(await doing(work.run(ALICE, ECHO, bytes(size)))).head for size in (60, 60, 100, 60, 60)]
    pids, nice = [head["pid"] for head in heads], [head["nice"] - heads[0]["nice"] for head in heads]
    assert pids[0] == pids[1] == pids[2] != pids[3] == pids[4]
    assert nice == [0, 0, tenant_work.NICENESS, 0, 0]
