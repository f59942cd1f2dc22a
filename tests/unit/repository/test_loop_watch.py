"""The watch over event loops catches what computes on one for long, and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.conftest import MOST_CALLBACK_S

LONG = 1.2 * MOST_CALLBACK_S


def compute() -> None:
    ends = time.thread_time() + LONG
    while time.thread_time() < ends:
        pass


async def test_a_callback_that_computes_for_long_is_caught(quick_callbacks: list[str]) -> None:
    asyncio.get_running_loop().call_soon(compute)
    await asyncio.sleep(0.001)
    assert len(quick_callbacks) == 1 and "compute" in quick_callbacks[0]
    quick_callbacks.clear()


async def test_a_task_of_a_product_s_code_that_computes_for_long_is_caught(quick_callbacks: list[str]) -> None:
    names: dict[str, Any] = {"compute": compute}
    exec(compile("async def handle(): compute()", "/gateway/routes.py", "exec"), names)
    await asyncio.create_task(names["handle"]())
    assert len(quick_callbacks) == 1 and "/gateway/routes.py: handle" in quick_callbacks[0]
    quick_callbacks.clear()


@pytest.mark.parametrize("wait", [time.sleep, lambda _: compute()], ids=["that waits", "of a test"])
async def test_a_task_is_not_caught(quick_callbacks: list[str], wait: Any) -> None:
    """Since on a busy machine each may take long by the clock."""

    async def task() -> None:
        wait(LONG)

    await asyncio.create_task(task())
    assert not quick_callbacks
