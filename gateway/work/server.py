"""The processes that work: one that is started loads what the work needs, and forks each that works off from itself.

A fork takes a few milliseconds and shares the loaded tokenizer's memory, so a process is cheap to end: when its client
left, when it takes too long, and behind a large job, whose memory and low priority it would keep. The process that
forks has one thread and no connection, unlike the gateway itself, which could not fork safely.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping

from gateway.work.frames import JobFrame, receive, send
from slipstream.errors import InvalidArgument, ResourceExhausted, SlipstreamError, code_number

log = logging.getLogger(__name__)

Handler = Callable[[JobFrame], JobFrame]
Handlers = Mapping[str, Handler]
"""By `kind` of a job's head: job -> result. May raise a SlipstreamError."""
MEMORY_BYTES = 1 << 30
"""Most memory of a process besides what it was forked with."""
FORK, KILL = b"f", b"k"
COMMAND = struct.Struct("!cq")
"""To the process that forks: FORK, with the socket of the new process beside it, or KILL and a process id."""
NUMBER = struct.Struct("!q")
"""Its answer to FORK: the process id."""


def serve(load: Callable[[JobFrame], Handlers]) -> None:
    """Run the process that forks until the gateway is gone. `load`: makes the handlers of what the gateway sent
    first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is the gateway that ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold texts
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(control)
    if setup is None:
        return
    handlers = load(setup)
    del setup
    gc.collect()
    gc.freeze()  # so that a fork's collector does not write to the pages that it shares
    children: set[int] = set()
    try:
        while (command := _command(control)) is not None:
            _reap(children)  # a child that ended keeps its id until then, so KILL reaches no other process
            (operation, pid), files = command
            if operation == FORK and files:
                children.add(_fork(control, files[0], handlers))
            elif operation == KILL and pid in children:
                os.kill(pid, signal.SIGKILL)
    except OSError:  # the gateway is gone
        pass
    finally:
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _command(control: socket.socket) -> tuple[tuple[bytes, int], list[int]] | None:
    data, files, _, _ = socket.recv_fds(control, COMMAND.size, 1)
    return (COMMAND.unpack(data), files) if len(data) == COMMAND.size else None


def _reap(children: set[int]) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)


def _fork(control: socket.socket, file: int, handlers: Handlers) -> int:
    pid = os.fork()
    if pid:
        os.close(file)
        control.sendall(NUMBER.pack(pid))
        return pid
    status = 1
    try:
        control.close()
        _bound_memory()
        work(socket.socket(fileno=file), handlers)
        status = 0
    except OSError:  # the gateway is gone
        pass
    finally:
        os._exit(status)


def _bound_memory() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def work(line: socket.socket, handlers: Handlers) -> None:
    """Do jobs, one after the other, until the gateway closes the socket."""
    while (job := receive(line)) is not None:
        os.nice(job.head["nice"])
        _bound_time(job.head["cpu_s"])
        result = _result(handlers[job.head["kind"]], job)
        del job
        send(line, result)
        del result


def _bound_time(seconds: int) -> None:
    """The kernel ends this process once it has computed for so many seconds more, whatever it is in the middle of."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _result(handle: Handler, job: JobFrame) -> JobFrame:
    try:
        return handle(job)
    except MemoryError:
        return _refusal(ResourceExhausted("The request takes too much memory to be read; send less.", reason="WORK"))
    except RecursionError:
        return _refusal(InvalidArgument("The request is nested too deeply.", reason="TOO_DEEP"))
    except SlipstreamError as error:
        return _refusal(error)
    except Exception as error:  # without its words, which may be a client's
        return JobFrame({"failed": type(error).__name__})


def _refusal(error: SlipstreamError) -> JobFrame:
    return JobFrame(
        {
            "code": code_number(error),
            "message": error.message,
            "more": {"reason": error.reason, "field": error.field, "numbers": dict(error.numbers)},
        }
    )
