"""Roles as real processes that need not import torch: forked from one that has.

`python -m verifier_svc` computes for three to four seconds before it serves, most of it while it imports, and a suite
starts a hundred such processes. So each test process forks a *template* once, when everything is imported and nothing
runs yet. The template forks a process for each command, with the descriptors, environment and folder that were asked
for, and runs the module in it as `python -m` does. The new process is a child of the one that asked, with an id, a
status and signals of its own: the template's child ends at once, and what it forked is adopted by its nearest
subreaper.

What reads the interpreter's own start (settings of glibc's allocator, `-X` options) is of the template.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_KEPT = (1 << 31) - 1
MOST_DESCRIPTORS = 4096
MOST_BYTES = 1 << 20
"""Of a command with its environment."""
OURS = {"slipstream", "gateway", "verifier_svc", "drafter_svc", "training", "capacity", "benchmarks", "tests"}
"""Packages whose modules may have computed something while tests were collected."""
SERVE = ["slipstream", "serve"]
"""The command whose process starts roles itself."""
COLLECT_BY_DEFAULT = (700, 10, 10)
"""The interpreter's own thresholds of garbage collection."""
ROLES = ("gateway.gateway", "drafter_svc.service", "verifier_svc.service")
"""What another tree's template imports."""


class Template:
    """The process that is forked, and what asks it."""

    def __init__(self, tree: Path | None = None) -> None:
        """To be called while this process has one thread, but for those that no fork needs. With `tree` it is a new
        interpreter that imports the roles of that source tree, which may be called at any time."""
        self._asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.set_inheritable(False)
        self._lock = threading.Lock()
        if tree is not None:
            environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
            command = [sys.executable, __file__, str(answering.fileno())]
            self._process = subprocess.Popen(command, env=environment, pass_fds=[answering.fileno()])
        elif not os.fork():
            self._asking.close()
            _answer(answering)
        answering.close()

    def end(self) -> None:
        """Of one that is an interpreter of its own."""
        self._asking.close()
        self._process.wait()

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: int,
        stderr: int = 2,
        cwd: str | Path = ".",
    ) -> int:
        """The id of a process that runs `python -m` with the command, a module and its arguments. It is a child of
        this one, in a session of its own."""
        asked = {"command": [*command], "environment": dict(environment), "cwd": str(Path(cwd).resolve())}
        with self._lock, _adopting():
            socket.send_fds(self._asking, [json.dumps(asked).encode()], [stdout, stderr])
            answer = self._asking.recv(64)
        if not answer:
            raise ChildProcessError("the template of forked processes has ended")
        return int(answer)


@contextmanager
def _adopting() -> Iterator[None]:
    """This process adopts what is orphaned below it."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _answer(asked: socket.socket) -> NoReturn:
    """The template's life: it ends with the process that asks it."""
    try:
        _forget_tests(asked.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the process that asks ends this one
        while True:
            message, descriptors, _, _ = socket.recv_fds(asked, MOST_BYTES, 2)
            if not message:
                break
            read, write = os.pipe()
            between = os.fork()
            if not between:
                parent = os.getpid()
                if child := os.fork():
                    os.write(write, str(child).encode())
                    os._exit(0)
                while os.getppid() == parent:  # a role that ends with its parent must not take this one for it
                    time.sleep(0.001)
                _run(json.loads(message), *descriptors)
            os.close(write)
            for each in descriptors:
                os.close(each)
            os.waitpid(between, 0)
            asked.send(os.read(read, 64))
            os.close(read)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(0)


def _forget_tests(kept: int) -> None:
    """Undo what a test runner changes in its process: descriptors, hooks, handlers and filters."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.closerange(3, kept)
    os.closerange(kept + 1, MOST_DESCRIPTORS)
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in OURS]:
        for value in list(vars(module).values()):
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()  # perhaps of threads, which no fork has
    gc.set_threshold(*COLLECT_BY_DEFAULT)
    atexit._clear()
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)


def _run(asked: Mapping[str, Any], stdout: int, stderr: int) -> NoReturn:
    """A process's life, as `python -m` begins and ends it."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, MOST_DESCRIPTORS)
        # Those that a process of the template forks again are dropped there, and must not close its descriptors.
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
        os.environ.clear()
        os.environ.update(asked["environment"])
        _keep_memory()
        ctypes.CDLL(None).prctl(PR_SET_NAME, asked["command"][0].encode(), 0, 0, 0)  # its command line is the parent's
        os.chdir(asked["cwd"])
        first = [] if os.environ.get("PYTHONSAFEPATH") else [asked["cwd"]]
        sys.path[:0] = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        module, *arguments = asked["command"]
        if asked["command"][:2] == SERVE:
            start_by_forking(Template())
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(status)


def _keep_memory() -> None:
    """As `slipstream.process.ALLOCATOR`, which glibc reads at a process's start only."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
    mallopt(M_MMAP_THRESHOLD, MOST_KEPT)


class Forked:
    """A forked process, as `subprocess.Popen` shows one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """None while it runs; the negative number of the signal that ended it."""
        if self._returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedCommand(Forked):
    """One that the test waits for in its own thread."""

    def __init__(self, template: Template, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        read, write = os.pipe()
        try:
            super().__init__(template.fork(command, environment, write, cwd=cwd))
        finally:
            os.close(write)
        self.stdout = os.fdopen(read)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    assert timeout is not None
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(ended)
        status = self.returncode
        assert status is not None
        return status


class ForkedProcess(Forked):
    """One that an event loop waits for, as `asyncio.subprocess.Process` shows it."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader) -> None:
        super().__init__(pid)
        self.stdout = stdout
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._note_end)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        assert self.returncode is not None
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        status = self.returncode
        assert status is not None
        return status

    async def communicate(self) -> tuple[bytes, None]:
        output = await self.stdout.read()
        await self.wait()
        return output, None


async def _fork_process(
    template: Template, command: Sequence[str], environment: Mapping[str, str], *, merged: bool = False
) -> ForkedProcess:
    read, write = os.pipe()
    loop, stdout = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(read, "rb", 0))
    try:
        pid = await asyncio.to_thread(template.fork, command, environment, write, write if merged else 2)
    finally:
        os.close(write)
    return ForkedProcess(pid, stdout)


_of_trees: dict[str, Template] = {}
"""By the path of modules of their processes."""


@contextmanager
def forking_from(tree: Path) -> Iterator[None]:
    """Roles of that source tree are forked too."""
    _of_trees[str(tree)] = template = Template(tree)
    try:
        yield
    finally:
        del _of_trees[str(tree)]
        template.end()


def start_by_forking(template: Template) -> None:
    """`slipstream.serving.role.Role` starts its processes from the template from now on, but for those of another
    interpreter, and of a source tree that has no template."""
    from slipstream.serving.role import Role  # an earlier tree's template has none, and needs none

    spawn = Role._run

    async def run(role: Any, more: Mapping[str, str], *options: str) -> Any:
        environment = role._environment(more)
        path = environment.get("PYTHONPATH")
        chosen = template if path == os.environ.get("PYTHONPATH") else _of_trees.get(path or "")
        if role._python != sys.executable or chosen is None:
            return await spawn(role, more, *options)
        return await _fork_process(chosen, [role.module, *options], environment)

    Role._run = run  # type: ignore[method-assign]


_template: Template | None = None


def begin() -> None:
    """Fork this process's template, when all is imported and nothing runs yet. Again, it does nothing."""
    global _template
    if _template is None:
        _template = Template()
        start_by_forking(_template)


async def start_process(
    command: Sequence[str], environment: Mapping[str, str], *, merged: bool = False
) -> ForkedProcess:
    """`python -m` with the command, for an event loop. `merged`: what it writes as errors is in its output."""
    assert _template is not None
    return await _fork_process(_template, command, environment, merged=merged)


def run_command(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> ForkedCommand:
    """`python -m` with the command; that of another tree where PYTHONPATH names one that has a template."""
    template = _of_trees.get(environment.get("PYTHONPATH", ""), _template)
    assert template is not None
    return ForkedCommand(template, command, environment, cwd)


if __name__ == "__main__":
    gc.disable()  # nothing that imports make is garbage
    for each in ROLES:
        importlib.import_module(each)
    gc.freeze()
    gc.enable()
    _answer(socket.socket(fileno=int(sys.argv[1])))
