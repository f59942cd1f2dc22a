from __future__ import annotations

from functools import cache
from pathlib import Path

import kubernetes_validate.utils
import pytest

from tests.manifests.rendering import tool
from tools.chart import write

kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
"""The library reads two files for each object, which takes 13 ms; one whose files are read takes less than 1 ms."""


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Helm chart's folder."""
    for name in ("kubectl", "npm"):
        tool(name)
    folder = tmp_path_factory.mktemp("chart") / "slipstream"
    write(folder)
    return folder
