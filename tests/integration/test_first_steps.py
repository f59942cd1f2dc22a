"""What goes wrong in a user's first minutes: each time one sentence that says what to do, at once."""

from __future__ import annotations

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.engine.factory import open_engine
from tests.support.fleet import drafter
from tests.support.forked_processes import start_process

ENVIRONMENT = os.environ | {"GRPC_VERBOSITY": "NONE"}


class Web(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@asynccontextmanager
async def listening(kind: str) -> AsyncIterator[str]:
    """The address at which something else listens than a gateway."""
    if kind == "drafter":
        async with drafter(open_engine("emulated:")) as address:
            yield address
    elif kind == "web":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as web:
            threading.Thread(target=web.serve_forever, daemon=True).start()
            yield f"127.0.0.1:{web.server_address[1]}"
            web.shutdown()
    elif kind == "silent":
        with socket.create_server(("127.0.0.1", 0)) as silent:
            yield f"127.0.0.1:{silent.getsockname()[1]}"
    else:
        yield "127.0.0.1:1"


async def said(*words: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    process = await start_process(["slipstream", *words], ENVIRONMENT, merged=True)
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("drafter", "another service answers at this address"),
        ("web", "not by gRPC"),
        ("nothing", "nothing listens at 127.0.0.1:1"),
    ],
)
async def test_a_wrong_port_is_explained(kind: str, sentence: str) -> None:
    async with listening(kind) as address:
        commands = [("status", "--server"), ("doctor", "--server"), ("generate", "x", "--server")]
        if kind != "drafter":
            commands.append(("doctor", "--worker"))
        for status, output in await asyncio.gather(*(said(*command, address) for command in commands)):
            assert status == 1 and sentence in output, output
            assert len(output.splitlines()) == 1 and "Traceback" not in output


async def test_a_port_that_answers_nothing_is_explained() -> None:
    async with listening("silent") as address:
        status, output = await said("status", "--server", address)
    assert status == 1 and "no answer came in time" in output


LOADED = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
finally:
    print(*{"torch", "transformers"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("module", "arguments", "setting"),
    [
        ("slipstream", ["serve", "--listen", "127.0.0.1:0", "--target"], ""),
        ("slipstream", ["serve", "--listen", "127.0.0.1:0", "--draft"], ""),
        ("verifier_svc", [], "VERIFIER_MODEL"),
        ("drafter_svc", [], "DRAFTER_MODEL"),
    ],
)
@pytest.mark.parametrize("empty", [True, False])
def test_a_missing_model_is_refused_before_torch_is_loaded(
    tmp_path: Path, module: str, arguments: list[str], setting: str, empty: bool
) -> None:
    folder = str(tmp_path if empty else tmp_path / "missing")
    words = [*arguments, folder] if arguments else []
    environment = ENVIRONMENT | ({setting: folder} if setting else {})
    done = subprocess.run(
        [sys.executable, "-c", LOADED, module, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and folder in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout.strip()


QUIET = """
import builtins, logging

load = builtins.__import__

def watched(name, *rest):
    if name.partition(".")[0] == "transformers":
        loggers = map(logging.getLogger, ("torchao", "torch.utils._pytree"))
        print(*((each.isEnabledFor(logging.WARNING), each.isEnabledFor(logging.ERROR)) for each in loggers))
        raise SystemExit
    return load(name, *rest)

builtins.__import__ = watched
"""
TRAIN = "from slipstream.cli.commands import app\napp(['train', '--steps', '1'])"
OPEN = "from slipstream.engine.factory import open_engine\nopen_engine('models/target')"


@pytest.mark.parametrize("command", [TRAIN, OPEN])
def test_warnings_of_libraries_stay_off_the_terminal_and_errors_do_not(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET + command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split("\n")[0] == "(False, True) (False, True)", done.stderr
