"""The embedded engine on a GPU: `make test-gpu`, on a machine with CUDA. Elsewhere every test here is skipped."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if torch.cuda.is_available():
        return
    if os.environ.get("GPU_REQUIRED"):
        pytest.fail("torch sees no GPU")
    pytest.skip("torch sees no GPU")
