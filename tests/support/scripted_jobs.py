"""Processes of `gateway.work` with jobs that a real one gets rarely: `python -m tests.support.scripted_jobs`."""

from __future__ import annotations

import os
import signal
import time

from gateway.work.frames import JobFrame
from gateway.work.server import Handlers, serve
from slipstream.errors import InvalidArgument


def load(setup: JobFrame) -> Handlers:
    def echo(job: JobFrame) -> JobFrame:
        about = {"pid": os.getpid(), "parent": os.getppid(), "nice": os.nice(0)}
        return JobFrame(about, bytes(setup.body) + bytes(job.body))

    return {"encode": echo, "chat": wait, "decode": misbehave}


def wait(job: JobFrame) -> JobFrame:
    """Until the file that the job names is there."""
    while not os.path.exists(bytes(job.body)):
        time.sleep(0.002)
    return JobFrame({})


def misbehave(job: JobFrame) -> JobFrame:
    match bytes(job.body):
        case b"refuse":
            raise InvalidArgument("no", reason="NO")
        case b"fail":
            raise KeyError("a text of somebody's")
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"grow":
            return JobFrame({}, bytes(4 << 30))
    while True:
        pass


if __name__ == "__main__":
    serve(load)
