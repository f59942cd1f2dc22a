"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from slipstream.engine.models.quantisation import silence_quantiser_logs
from slipstream.process import COLLECT_AFTER
from tests.support import forked_processes
from tests.support.loop_watch import TESTS, code_of, watching

silence_quantiser_logs()
# A shell's background jobs ignore Ctrl-C, and so would all processes that tests start there and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a machine, not us
settings.load_profile("suite")

OF_ONE_SERVER = {
    f"tests/e2e/test_{name}.py"
    for name in (
        "bad_input",
        "ctrl_c",
        "draft_in_verifier",
        "exactness",
        "http",
        "readme",
        "structured_output",
        "traces",
    )
}
"""Files that ask for `server` of tests/e2e/conftest.py, which is of one worker."""
MANIFESTS = "tests/manifests/"
"""What its files ask kubectl and npm for is kept by the worker."""
REAL_MODEL = "tests/real_model/"
"""One worker holds the weights and starts the server of these files."""


class Files(LoadFileScheduling):
    """Each file on one worker, and files that share something costly on the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        for together in (MANIFESTS, REAL_MODEL):
            if file.startswith(together):
                return together
        return "server" if file in OF_ONE_SERVER else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files | None:
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Nothing that imports make is garbage: the collector would go through all of torch again and again, in every
    worker, here and during the tests. What is imported by now, processes of tests need not import again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)  # as roles do: by default tests of gateways spend a sixth of their time on it
        gc.enable()
        if runs_tests(session.config) and sys.platform == "linux" and "vllm" not in sys.modules:
            from tests.support import mended_faults  # noqa: F401  # what is forked has its handler too

            forked_processes.begin()


def runs_tests(config: pytest.Config) -> bool:
    """Whether this process runs tests, and does not distribute them to workers."""
    return hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"


MOST_CALLBACK_S = 0.5
"""CPU seconds that what runs on an event loop may take at a time; streams stand for as long. Tests' own coroutines are
not counted."""


@pytest.fixture(autouse=True)
def quick_callbacks() -> Iterator[list[str]]:
    """Fails a test in which something held an event loop for long; a test that wants that empties the list."""
    slow: list[str] = []

    def note(took_s: float, handle: Any) -> None:
        code = code_of(handle)
        if not code.startswith(TESTS) and "pytest_asyncio" not in code:
            slow.append(f"{took_s:.2f} CPU seconds on the event loop: {code}")

    with watching(MOST_CALLBACK_S, note):
        yield slow
    assert not slow, slow


@pytest.fixture(autouse=True)
def no_mended_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which a fault was mended, unless it is marked `mended_faults`."""
    from tests.support.mended_faults import FAULTS

    FAULTS.take()
    yield
    faults = FAULTS.take()
    assert not faults or request.node.get_closest_marker("mended_faults"), faults


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from tests.support.redis_server import redis_server  # which vLLM's environment, without redis, never asks for

    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url
