from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.chaos.cluster import Cluster, cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[Cluster]:
    """One for all tests of a file: each must leave it as it was."""
    async with cluster() as running:
        yield running
