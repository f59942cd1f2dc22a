"""Work of tenants beside the event loop: charged, bounded, in turns, cancelled with its client, and timed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gateway.auth.tenant import Tenant
from gateway.work.frames import Buffer, JobFrame
from gateway.work.processes import ProcessLost, ProcessSource, WorkingProcess
from slipstream.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable, from_code
from slipstream.telemetry import metrics
from slipstream.tenants import FairQueue

log = logging.getLogger(__name__)

KINDS: Final = {
    **dict.fromkeys(("encode", "chat", "tokenize"), 256),
    "decode": 1024,
    **dict.fromkeys(("body", "message", "deflate", "inflate"), 4096),
}
"""Bytes of a job of each kind that are charged as one token: encoding them costs some 0.1 ms on the gateway's machine,
where a token of a prompt costs at least as much on the verifier's."""
CPU_S = 10
"""Most seconds of computing of one job."""
STALL_S = 120.0
"""Seconds after which a process that gave no answer is given up, although the kernel did not end it."""
WAIT_S = 60.0
"""Most seconds that a job waits for its turn."""
LARGE_BYTES = 1 << 16
"""A job of so many bytes gives way to everything else on the machine, and its process is replaced: that keeps neither
the priority nor the memory."""
NICENESS = 10


@dataclass(eq=False, slots=True)
class _QueuedJob:
    frame: JobFrame
    result: asyncio.Future[JobFrame]
    """Cancelled where its client left."""
    arrived_at: float
    begun: bool = False


class TenantWork:
    """`run` does one job for a tenant. Nothing is started before the first job, or `prepare`."""

    def __init__(
        self,
        source: ProcessSource,
        processes: int,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`processes`: that work at a time; one tenant has at most all but one. `most_bytes`: of the jobs of one tenant
        that wait."""
        self._source = source
        self._processes = processes
        self._clock = clock
        self._queue: FairQueue[_QueuedJob] = FairQueue(max(1, processes - 1), most_bytes)
        self._idle: list[WorkingProcess] = []
        self._serving: set[asyncio.Task[None]] = set()
        self.waiting: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        """Jobs that have not begun, by kind."""
        self.seconds = metrics.TEXT_JOB_SECONDS.histogram()
        self.failures: Counter[tuple[str, ...]] = Counter()
        """By kind and reason."""

    async def prepare(self) -> None:
        """Start one process, so that the first job does not wait for it. Raises Unavailable."""
        try:
            self._idle.append(await self._source.new())
        except ProcessLost as error:
            raise Unavailable("the process that reads long texts could not be started", reason="WORK") from error

    async def run(self, tenant: Tenant, kind: str, body: Buffer, **options: Any) -> JobFrame:
        """The result of a job. Cancelling ends it. Raises what the work raises, ResourceExhausted for more than the
        tenant may have waiting, or its quota allows, InvalidArgument for what takes too long, Unavailable where the
        process was lost."""
        self._check(tenant.name, kind, body)
        await tenant.charge(-(-len(body) // KINDS[kind]))
        self._check(tenant.name, kind, body)
        loop = asyncio.get_running_loop()
        limits = {"cpu_s": CPU_S, "nice": NICENESS if len(body) >= LARGE_BYTES else 0}
        job = _QueuedJob(JobFrame({"kind": kind} | limits | options, body), loop.create_future(), self._clock())
        self._queue.put(tenant.name, job, len(body))
        self.waiting[kind] += 1
        self._begin_jobs()
        turn = loop.call_later(WAIT_S, self._time_out, tenant.name, job)
        try:
            return _checked(await job.result)
        finally:
            turn.cancel()
            self._take_out(tenant.name, job)

    async def close(self) -> None:
        """End all work."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for process in self._idle:
            process.retire()
        self._idle.clear()
        await self._source.close()

    def _check(self, tenant: str, kind: str, body: Buffer) -> None:
        """Raises ResourceExhausted where nothing more may wait for the tenant."""
        try:
            self._queue.check(tenant, len(body))
        except ResourceExhausted:
            self.failures[kind, "refused"] += 1
            raise

    def _begin_jobs(self) -> None:
        while len(self._serving) < self._processes and (taken := self._queue.take()) is not None:
            task = asyncio.get_running_loop().create_task(self._serve(*taken))
            self._serving.add(task)

    async def _serve(self, tenant: str, job: _QueuedJob) -> None:
        """Do one job in a process, and begin those whose turn it is then."""
        kind = job.frame.head["kind"]
        job.begun = True
        self.waiting[kind] -= 1
        try:
            await self._work(kind, job)
        except Exception as error:
            _fail(job, error)
        finally:
            self._queue.done(tenant)
            self.seconds.labels(kind).observe(self._clock() - job.arrived_at)
            task = asyncio.current_task()
            assert task is not None
            self._serving.discard(task)
            if not task.cancelling():
                self._begin_jobs()
            job.result.cancel()  # where this ended before the job did

    async def _work(self, kind: str, job: _QueuedJob) -> None:
        try:
            process = await self._process()
        except ProcessLost:
            self._count(
                kind, "process_ended", job, Unavailable("the gateway cannot read long texts now.", reason="WORK_LOST")
            )
            return
        began, result = self._clock(), None
        try:
            result = await _answer(process, job)
        finally:
            if result is None:
                process.kill()
            elif job.frame.head["nice"]:
                process.retire()
            else:
                self._idle.append(process)
        if result is not None:
            if not job.result.done():
                job.result.set_result(result)
        elif job.result.cancelled():
            self.failures[kind, "disconnected"] += 1
        elif self._clock() - began >= CPU_S:
            error = InvalidArgument("The request takes too long to be read; send less.", reason="WORK_TOO_COSTLY")
            self._count(kind, "too_costly", job, error)
        else:
            lost = Unavailable("the process that read the request was lost; try again.", reason="WORK_LOST")
            self._count(kind, "process_ended", job, lost)

    async def _process(self) -> WorkingProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.kill()
        return await self._source.new()

    def _time_out(self, tenant: str, job: _QueuedJob) -> None:
        if self._take_out(tenant, job):
            error = ResourceExhausted("earlier requests of this tenant take too long; try again later.", reason="WORK")
            self._count(job.frame.head["kind"], "timeout", job, error)

    def _take_out(self, tenant: str, job: _QueuedJob) -> bool:
        """Return True if the job was still waiting."""
        if job.begun or not self._queue.remove(tenant, job):
            return False
        self.waiting[job.frame.head["kind"]] -= 1
        return True

    def _count(self, kind: str, reason: str, job: _QueuedJob, error: Exception) -> None:
        self.failures[kind, reason] += 1
        _fail(job, error)


async def _answer(process: WorkingProcess, job: _QueuedJob) -> JobFrame | None:
    """None where the process was lost or gives no answer, or the client left."""
    asking = asyncio.ensure_future(process.ask(job.frame))
    waited: list[asyncio.Future[Any]] = [asking, job.result]
    try:
        await asyncio.wait(waited, timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    except ProcessLost:
        return None
    finally:
        if asking.cancel():
            await asyncio.wait([asking])


def _fail(job: _QueuedJob, error: Exception) -> None:
    if not job.result.done():
        job.result.set_exception(error)


def _checked(result: JobFrame) -> JobFrame:
    """Raises the error that a result stands for."""
    head = result.head
    if "code" in head:
        raise from_code(head["code"], head["message"], **head["more"])
    if "failed" in head:
        log.error("work for a request failed: %s", head["failed"])
        raise Internal("an internal error happened; please report it with the time it happened at.")
    return result
