from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, cluster

if "SLIPSTREAM_CLUSTER" not in os.environ:  # `python -m tests.cluster` makes the namespaces that these need
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[Cluster]:
    with cluster() as made:
        yield made
