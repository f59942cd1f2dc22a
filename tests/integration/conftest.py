from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.collector import Collector, collecting
from tests.support.gateway_calls import Shared, shared_session
from tests.support.scripted_gateway import Setting
from tests.support.toy_tokenizer import toy_tokenizer
from tests.support.traced_system import System, check


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def setting(folder: Path) -> AsyncIterator[Setting]:
    async with AsyncExitStack() as stack:
        yield Setting(folder, stack)


@pytest.fixture
async def shared(setting: Setting) -> Shared:
    return await shared_session(setting)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
async def system(collector: Collector) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        yield System(stack, collector)
    check(await collector.spans())
