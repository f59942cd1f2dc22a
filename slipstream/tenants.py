"""Separation of the tenants of one process: opaque names and cache salts, values and threads of each.

Workers never learn more of a tenant than `tenant_id` and its salts. What one tenant's requests teach decides nothing
for another's, and the slow work of one delays no other's.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar

from slipstream.errors import ResourceExhausted

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")
T = TypeVar("T")
MOST_TENANTS = 256
"""Tenants that are remembered; the one that was used longest ago goes first."""
MOST_WAITING = 2048
"""Most jobs of one tenant that wait."""
_starting = threading.Lock()
_Job = tuple[Future[Any], Callable[[], Any]]


def tenant_id(name: str) -> str:
    """The name by which workers know the tenant of an API key: 12 hexadecimal digits of a hash; empty for no name."""
    return hashlib.sha256(name.encode()).hexdigest()[:12] if name else ""


def tenant_salt(name: str, asked: str) -> str:
    """The salt of a tenant's requests that asked for this one, 64 characters. Another tenant's differs, whatever it
    asks for."""
    whole = hashlib.sha256(f"{name}\0{asked}".encode()).hexdigest()
    return f"{tenant_id(name)}.{whole[:51]}"


class PerTenant(Generic[T]):
    """One value for each tenant, made when it is first asked for. Sessions without a tenant's name share one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: OrderedDict[str, T] = OrderedDict()

    def __getitem__(self, tenant: str) -> T:
        value = self._values.get(tenant)
        if value is None:
            value = self._values[tenant] = self._make()
            if len(self._values) > MOST_TENANTS:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(tenant)
        return value

    def __iter__(self) -> Iterator[T]:
        return iter(self._values.values())


class TenantCache(Generic[K, T]):
    """At most `most` values, for instance compiled grammars. One too many drops one of the tenant that has the most of
    them, its own least recently used: whoever asks for many things loses its own, and no other tenant's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, OrderedDict[K, T]] = OrderedDict()
        """By tenant; tenants and keys that were used last come last."""

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    def get(self, tenant: str, key: K) -> T | None:
        """The value, which counts as used; None for one that is not kept."""
        own = self._values.get(tenant)
        if own is None or key not in own:
            return None
        self._values.move_to_end(tenant)
        own.move_to_end(key)
        return own[key]

    def put(self, tenant: str, key: K, value: T) -> None:
        own = self._values.setdefault(tenant, OrderedDict())
        own[key] = value
        self._values.move_to_end(tenant)
        own.move_to_end(key)
        if len(self) > self._most:
            greediest = max(self._values, key=lambda each: len(self._values[each]))
            self._values[greediest].popitem(last=False)
            if not self._values[greediest]:
                del self._values[greediest]


class FairQueue(Generic[T]):
    """Jobs that wait, by tenant: tenants take turns, and those of one tenant run in the order in which they came. One
    tenant has at most `most_running` of them at a time, so that another one's next job need not wait for one of these.

    Bounded for each tenant, in jobs and in bytes. Not safe for threads."""

    def __init__(self, most_running: int, most_bytes: int = 0) -> None:
        """`most_bytes`: of what waits for one tenant; 0: not counted."""
        self._most_running = most_running
        self._most_bytes = most_bytes
        self._waiting: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()
        """By tenant, the one whose turn is next first."""
        self._bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    def put(self, tenant: str, job: T, size: int = 0) -> None:
        """`size`: bytes of the job. Raises what `check` raises."""
        self.check(tenant, size)
        self._waiting.setdefault(tenant, deque()).append((job, size))
        self._bytes[tenant] += size

    def check(self, tenant: str, size: int = 0) -> None:
        """Raises ResourceExhausted for a tenant with MOST_WAITING jobs, or without room for so many bytes more."""
        over = self._most_bytes and self._bytes[tenant] + size > self._most_bytes
        if len(self._waiting.get(tenant, ())) >= MOST_WAITING or over:
            raise ResourceExhausted("too much of this tenant's work waits already; try again later.", reason="WORK")

    def take(self) -> tuple[str, T] | None:
        """The job whose turn it is, with its tenant, which runs one more until `done`; None where all have to wait."""
        tenant = next((each for each in self._waiting if self._running[each] < self._most_running), None)
        if tenant is None:
            return None
        jobs = self._waiting.pop(tenant)
        job, size = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # last: the others have their turns first
        self._running[tenant] += 1
        self._forget(tenant, size)
        return tenant, job

    def done(self, tenant: str) -> None:
        """A job of this tenant has ended."""
        self._running[tenant] -= 1
        self._running += Counter()  # drops those that run nothing

    def remove(self, tenant: str, job: T) -> bool:
        """Take a job out whose client has left. Returns whether it was still in the queue."""
        jobs = self._waiting.get(tenant, deque())
        found = next((each for each in jobs if each[0] is job), None)
        if found is None:
            return False
        jobs.remove(found)
        if not jobs:
            del self._waiting[tenant]
        self._forget(tenant, found[1])
        return True

    def _forget(self, tenant: str, size: int) -> None:
        self._bytes[tenant] -= size
        self._bytes += Counter()


class FairThreads:
    """Runs jobs in the order of a FairQueue. One tenant has at most all threads but one, so another one's next job
    waits for no job of its own length.

    For functions that release the interpreter's lock and whose cost a client chooses, such as that of a grammar."""

    def __init__(self, threads: int, name: str, stack_bytes: int = 0) -> None:
        """`stack_bytes`: size of each thread's stack; 0: the usual one. The threads start with the first job, and end
        with the process."""
        self._changed = threading.Condition()
        self._queue: FairQueue[_Job] = FairQueue(max(1, threads - 1))
        self._names = [f"{name}-{number}" for number in range(threads)]
        """Names of threads that are to start."""
        self._stack_bytes = stack_bytes

    def _start(self) -> None:
        with _starting:  # the size of a stack is a setting of the whole process
            usual = threading.stack_size(self._stack_bytes)
            try:
                while self._names:
                    threading.Thread(target=self._work, name=self._names.pop(0), daemon=True).start()
            finally:
                threading.stack_size(usual)

    def submit(self, tenant: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Runs the function when it is the tenant's turn. Raises ResourceExhausted for a tenant with MOST_WAITING
        jobs."""
        future: Future[R] = Future()
        with self._changed:
            self._queue.put(tenant, (future, lambda: function(*args, **kwargs)))
            if self._names:
                self._start()
            self._changed.notify()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while (taken := self._queue.take()) is None:
                    self._changed.wait()
            tenant, job = taken
            _run(*job)
            del job, taken  # what they hold is not kept while nothing runs
            with self._changed:
                self._queue.done(tenant)
                self._changed.notify()


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
