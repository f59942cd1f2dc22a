"""`python -m tests.working`: processes that work for `gateway.work`'s tests, on jobs that a real one gets rarely."""

from __future__ import annotations

import os
import signal
import time

from gateway.work.frames import Frame
from gateway.work.server import Handlers, serve
from slipstream.errors import InvalidArgument


def load(setup: Frame) -> Handlers:
    def echo(job: Frame) -> Frame:
        about = {"pid": os.getpid(), "parent": os.getppid(), "nice": os.nice(0)}
        return Frame(about, bytes(setup.body) + bytes(job.body))

    return {"encode": echo, "chat": wait, "decode": misbehave}


def wait(job: Frame) -> Frame:
    """Until the file that the job names is there."""
    while not os.path.exists(bytes(job.body)):
        time.sleep(0.002)
    return Frame({})


def misbehave(job: Frame) -> Frame:
    match bytes(job.body):
        case b"refuse":
            raise InvalidArgument("no", reason="NO")
        case b"fail":
            raise KeyError("a text of somebody's")
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"grow":
            return Frame({}, bytes(4 << 30))
    while True:
        pass


if __name__ == "__main__":
    serve(load)
