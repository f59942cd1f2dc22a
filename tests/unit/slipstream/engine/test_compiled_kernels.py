"""The fused kernels compile for GPUs, with the arithmetic that the interpreter tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compiled_kernels import KERNELS, RANKING

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="torch came without Triton")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["75"], id="T4", marks=pytest.mark.slow),
        pytest.param(["90"], id="H100", marks=pytest.mark.long),
        pytest.param(["90", "narrow"], id="H100, narrow"),
    ],
)
def test_all_kernels_compile_and_fuse_no_products_with_sums(words: list[str], tmp_path: Path) -> None:
    """A product and a sum that were rounded together would not be what torch's operators compute."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_kernels", *words],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr
    lines = [line.split() for line in made.stdout.splitlines()]
    assert [name for name, *_ in lines] == [*KERNELS, *RANKING]
    assert all(int(size) > 1000 and int(fused) == 0 for _, size, fused in lines)
