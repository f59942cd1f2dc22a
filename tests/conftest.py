"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slipstream.engine.quantisation import hush
from tests.redis_server import redis_server

hush()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url
