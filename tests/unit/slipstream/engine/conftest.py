"""What tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernels import compile_kernels


@pytest.fixture(scope="session")
def compiled() -> Path:
    """The kernels as their source is now."""
    return compile_kernels()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial that passed in one test is not taken for the next one's, whose engine may be another."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
