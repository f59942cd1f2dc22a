"""Nothing of a gateway runs beside its event loop but what is listed here, with its owner and its bound: a thread or a
process that one tenant's requests can fill is one that all others wait for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = {"to_thread", "run_in_executor", "Thread", "Process", "Popen", "fork", "create_subprocess_exec"}
NAMES |= {"ThreadPoolExecutor", "ProcessPoolExecutor", "FairThreads", "run_in_threadpool", "create_subprocess_shell"}
ALLOWED = {
    # file, name: (times, owner, bound)
    ("gateway/gateway.py", "to_thread"): (1, "the start of a gateway", "once, before it listens"),
    ("gateway/api/http/operations.py", "to_thread"): (1, "/metrics", "operators' keys, one page at a time"),
    ("gateway/work/processes.py", "Popen"): (2, "ProcessSource", "one at a time (the other is its type)"),
    ("gateway/work/server.py", "fork"): (1, "TenantWork", "GATEWAY_TEXT_PROCESSES, tenants in turns"),
}


def started(source: str) -> Iterator[str]:
    """Names of what runs beside the thread of the source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name in NAMES)


def handlers(source: str) -> Iterator[str]:
    """Routes that are plain functions, which the framework runs on threads of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("router." in ast.unparse(each) for each in node.decorator_list):
            yield node.name


def test_all_that_runs_beside_a_gateways_event_loop_has_an_owner_and_a_bound() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for path in (ROOT / "gateway").rglob("*.py"):
        source = path.read_text("utf-8")
        found.update((str(path.relative_to(ROOT)), name) for name in started(source))
        assert not list(handlers(source)), path
    assert found == {place: times for place, (times, _, _) in ALLOWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.to_thread(f)",
        "loop.run_in_executor(None, f)",
        "from threading import Thread",
        "from concurrent.futures import ThreadPoolExecutor as Pool",
        "multiprocessing.Process(target=f)",
        "run = asyncio.to_thread",
    ],
)
def test_each_of_it_would_be_found(source: str) -> None:
    assert list(started(source))


def test_a_route_on_the_frameworks_threads_would_be_found() -> None:
    assert list(handlers('@router.get("/x")\ndef x() -> int:\n    return 1')) == ["x"]
