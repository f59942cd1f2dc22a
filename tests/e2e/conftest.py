"""The whole system as its users start it: `slipstream serve`, three real processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from benchmarks.load_generator import LoadResult, run_load
from slipstream.serving.role import Role
from slipstream.v1 import gateway_pb2
from tests.support.forked_processes import ForkedCommand, run_command
from tests.support.http_client import CHAT_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]


ASKED_ALONE = {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}
"""Where traces are written, those of requests whose client wants one."""
MEASURED = {"VERIFIER_MEASURE_S": "1"}
"""A verifier knows enough of its target's costs after that, and learns the rest while it serves."""
UNMEASURED = {"VERIFIER_MEASURE_S": "0"}
"""Where costs decide nothing."""
SPECULATING = {"VERIFIER_ALWAYS_SPECULATE": "true", "VERIFIER_MAX_DRAFT_TOKENS": "8"} | UNMEASURED
"""Candidates are verified whatever the speed of this machine, and its load, say about their worth."""


def serve_command(*options: str) -> list[str]:
    """`slipstream serve` at a free port, with drafters of their own processes unless told otherwise: alike on every
    machine."""
    given = [*options] if "--draft-in-verifier" in options else ["--no-draft-in-verifier", *options]
    ports = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    return [sys.executable, "-m", "slipstream", "serve", *ports, "--threads", "1", *given]


def serve_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"} | ASKED_ALONE | MEASURED


@contextmanager
def serving(*options: str, **settings: str) -> Iterator[str]:
    """The gateway's address, while `slipstream serve` runs with these options and settings."""
    with serving_both(*options, **settings) as (grpc, _):
        yield grpc


@contextmanager
def serve_process(*options: str, **settings: str) -> Iterator[ForkedCommand]:
    """`slipstream serve`, forked, and killed with the block if it has not ended."""
    process = run_command(serve_command(*options)[2:], serve_environment() | settings, ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def serving_both(*options: str, **settings: str) -> Iterator[tuple[str, str]]:
    """The gateway's addresses for gRPC and for HTTP."""
    with serve_process(*options, **settings) as process:
        line = process.stdout.readline()
        assert line.startswith("ready grpc="), line
        ready = dict(word.partition("=")[::2] for word in line.split()[1:])
        yield ready["grpc"], ready["http"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


Start = Callable[..., Awaitable[tuple[Role, str]]]
"""(module, **settings) -> the role's process, and the address it serves at."""


@asynccontextmanager
async def starting() -> AsyncIterator[tuple[AsyncExitStack, Start]]:
    """Roles as processes of their own, which end with the block, as does what else is put on the stack."""
    async with AsyncExitStack() as stack:

        async def start(module: str, **settings: str) -> tuple[Role, str]:
            role = Role(module, MEASURED | settings | {"OMP_NUM_THREADS": "1"})
            stack.push_async_callback(role.end)
            return role, await role.start()

        yield stack, start


MOST_TRIES = 10
"""On a machine that is busy for a moment a candidate of so small a target comes too late, or does not pay."""


def tokens(load: LoadResult) -> list[list[int]]:
    return [completion.token_ids for completion in load.completions]


async def accepting(
    server: str,
    requests: Sequence[gateway_pb2.GenerateRequest],
    expected: list[list[int]],
    enough: Callable[[LoadResult], bool] = lambda load: load.total("accepted") > 0,
) -> LoadResult:
    """The expected texts, generated with candidates: again until enough of those were accepted."""
    for _ in range(MOST_TRIES):
        load = await run_load(server, requests, 4)
        assert tokens(load) == expected
        if enough(load):
            return load
    raise AssertionError(f"hardly a candidate was accepted in {MOST_TRIES} tries")


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `server` writes its traces."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def servers(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The shipped pair in fp32, where texts are promised to be identical: its addresses for gRPC and for HTTP."""
    template = tmp_path_factory.mktemp("chat") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    options = ("--dtype", "float32", "--traces", str(traces), "--chat-template", str(template))
    with serving_both(*options, **SPECULATING) as addresses:
        yield addresses


@pytest.fixture(scope="session")
def server(servers: tuple[str, str]) -> str:
    return servers[0]
