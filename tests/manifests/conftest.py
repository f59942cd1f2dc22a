from __future__ import annotations

from pathlib import Path

import pytest

from tests.manifests.rendering import tool
from tools.chart import write


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Helm chart's folder."""
    for name in ("kubectl", "npm"):
        tool(name)
    folder = tmp_path_factory.mktemp("chart") / "slipstream"
    write(folder)
    return folder
