"""`slipstream serve` of the shipped pair, for clients that nobody here wrote."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.auth.api_keys import digest
from tests.clients.environments import CLIENTS, ROOT, SHORT

REQUIRED = "CLIENTS_REQUIRED"
"""Set to 1 by `make test-clients`: environments are made and clients run. Else all are left out, visibly."""
CHOSEN = "CLIENTS"
"""Names of the clients that run then, with spaces between; `short`: those of CI's short form; empty: all."""


@dataclass(frozen=True)
class Served:
    grpc: str
    """HOST:PORT."""
    http: str
    """HOST:PORT."""
    key: str = ""
    """API key that opens it; empty: none is asked for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen, here = chosen_clients(os.environ.get(CHOSEN, "")), str(Path(__file__).parent)
    left_out = pytest.mark.skip(reason=f"{REQUIRED} is not set; `make test-clients` runs these")
    for item in items:
        if not str(item.path).startswith(here + os.sep) or "environment" not in item.fixturenames:
            continue
        assert isinstance(item, pytest.Function)
        client = next(iter(item.callspec.params.values()))
        if os.environ.get(REQUIRED) != "1":
            item.add_marker(left_out)
        elif client not in chosen:
            item.add_marker(pytest.mark.skip(reason=f"{CHOSEN} does not name {client}"))


def chosen_clients(named: str) -> set[str]:
    """Raises UsageError for a name that no client has: it would run nothing, and pass."""
    names = set(SHORT if named == "short" else named.split() or CLIENTS)
    if unknown := names - set(CLIENTS):
        raise pytest.UsageError(f"{CHOSEN} names {sorted(unknown)}; there are {', '.join(CLIENTS)}")
    return names


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving({}) as (grpc, http):
        yield Served(grpc, http)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model behind an API key."""
    key = secrets.token_urlsafe(32)
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'clients = {{ sha256 = "{digest(key).hex()}" }}\n')
    with serving({"GATEWAY_API_KEYS": str(keys)}) as (grpc, http):
        yield Served(grpc, http, key)


@contextmanager
def serving(settings: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Addresses of gRPC and HTTP."""
    command = [sys.executable, "-m", "slipstream", "serve", "--json"]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--served-model-name", "alias"]
    command += ["--chat-template", str(Path(__file__).parent / "chat.jinja")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, text=True, **pipes) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        try:
            yield ready["grpc"], ready["http"]
        finally:
            process.terminate()
            process.wait(60)
