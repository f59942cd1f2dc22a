"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from slipstream.engine.models.quantisation import silence_quantiser_logs

silence_quantiser_logs()
# A shell's background jobs ignore Ctrl-C, and so would all processes that tests start there and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of a machine, not us
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that imports make is garbage: the collector would go through all of torch again and again, in every
    worker, here and during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from tests.redis_server import redis_server  # which vLLM's environment, without redis, never asks for

    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url
