"""The gateway's end of its working processes: starting, asking and ending them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gateway.work.frames import JobFrame, receive_async, send_async
from gateway.work.server import COMMAND, FORK, KILL, NUMBER

START_S = 120.0
"""Seconds in which the process that forks has to load what the work needs, on however busy a machine."""
CLOSE_S = 2.0
"""Seconds that the process that forks has to end the others."""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ProcessLost(Exception):
    """The process ended before it had answered."""


class WorkingProcess:
    """One that works, on one job at a time."""

    def __init__(self, line: socket.socket, pid: int, end: Callable[[int], None]) -> None:
        self._line = line
        self._end = end
        self.pid = pid

    @property
    def alive(self) -> bool:
        """Whether the process still waits for a job."""
        try:
            self._line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def ask(self, job: JobFrame) -> JobFrame:
        """Raises ProcessLost. Once this was cancelled, the process is of no use any more."""
        try:
            await send_async(self._line, job)
            result = await receive_async(self._line)
        except OSError as error:
            raise ProcessLost from error
        if result is None:
            raise ProcessLost
        return result

    def kill(self) -> None:
        """End it, whatever it does."""
        self._end(self.pid)
        self.retire()

    def retire(self) -> None:
        """End it where it has no job."""
        self._line.close()


class ProcessSource:
    """Starts processes that run `module`; nothing runs before the first is asked for."""

    def __init__(self, module: str, setup: Callable[[], JobFrame]) -> None:
        """`module`: run by its name, it calls `gateway.work.server.serve`. `setup`: makes what is sent to it once."""
        self._module = module
        self._setup = setup
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._forked = False

    async def new(self) -> WorkingProcess:
        """Raises ProcessLost where none can be started."""
        async with self._starting:
            for _ in range(2):  # where the process that forks is gone, by another one
                try:
                    return await self._fork(self._control or await self._start())
                except (OSError, TimeoutError, ProcessLost) as error:
                    await self.close()
                    lost = error
        raise ProcessLost from lost

    async def close(self) -> None:
        """End all processes."""
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()  # the process that forks then kills the others, and ends
        if process is not None:
            ends = time.monotonic() + CLOSE_S
            while self._forked and process.poll() is None and time.monotonic() < ends:
                await asyncio.sleep(0.002)
            process.kill()
            process.wait()
        self._forked = False

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        path = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the gateway's is read by processes that wait for its address
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        await send_async(ours, self._setup())
        return ours

    async def _fork(self, control: socket.socket) -> WorkingProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(control, [COMMAND.pack(FORK, 0)], [theirs.fileno()])
            async with asyncio.timeout(START_S):
                number = await asyncio.get_running_loop().sock_recv(control, NUMBER.size)
            if len(number) < NUMBER.size:
                raise ProcessLost
            self._forked = True
        except BaseException:
            ours.close()
            raise
        return WorkingProcess(ours, NUMBER.unpack(number)[0], self._kill)

    def _kill(self, pid: int) -> None:
        if self._control is not None:
            try:
                self._control.send(COMMAND.pack(KILL, pid))
            except OSError:  # the process that forks is gone, or has much to do: this one ends with its socket
                return
