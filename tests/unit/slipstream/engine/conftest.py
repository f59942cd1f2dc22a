"""What tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import compile_kernels


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as their source is now."""
    return compile_kernels(tmp_path_factory.mktemp("kernels"))
