"""A gateway as a process of its own, which a test may end or kill."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.forked_processes import ForkedProcess, start_process


async def announced(process: ForkedProcess) -> str:
    """The gRPC address in the line that a process prints when it can serve."""
    return (await ready_line(process))["grpc"]


async def ready_line(process: ForkedProcess) -> dict[str, str]:
    """The addresses in that line, by protocol."""
    line = (await process.stdout.readline()).decode()
    assert line.startswith("ready grpc=127.0.0.1:"), line
    return dict(word.split("=", 1) for word in line.split()[1:])


@asynccontextmanager
async def gateway_process(folder: Path, verifier: str, **settings: str) -> AsyncIterator[ForkedProcess]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    environ |= {"GATEWAY_TOKENIZER": str(folder), "GATEWAY_VERIFIERS": verifier, "GATEWAY_LISTEN": "127.0.0.1:0"}
    environ |= {f"GATEWAY_{name.upper()}": value for name, value in settings.items()}
    process = await start_process(["gateway"], environ)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
