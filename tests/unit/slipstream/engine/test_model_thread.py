from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from slipstream.engine import model_thread as module
from slipstream.engine.model_thread import ModelThread


async def test_functions_run_in_order_on_one_thread_of_their_own() -> None:
    seen: list[tuple[int, int]] = []
    async with ModelThread() as thread:
        await asyncio.gather(*(thread.run(lambda at=at: seen.append((at, threading.get_ident()))) for at in range(20)))
    assert [at for at, _ in seen] == list(range(20))
    assert len({ident for _, ident in seen}) == 1
    assert seen[0][1] != threading.get_ident()


async def test_a_function_has_begun_on_return_where_the_thread_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAND_OVER_S", 5.0)
    gate = threading.Event()
    async with ModelThread() as thread:
        for _ in range(50):
            while not thread._idle:
                await asyncio.sleep(0.0001)
            gate.clear()
            running = thread.run(gate.wait, 5.0)
            assert not thread._idle
            gate.set()
            assert await running


async def test_a_busy_thread_keeps_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAND_OVER_S", 60.0)
    begun, gate = threading.Event(), threading.Event()
    async with ModelThread() as thread:
        running = thread.run(lambda: begun.set() or gate.wait(5.0))
        assert begun.wait(5.0)
        following = [thread.run(divmod, 7, 2) for _ in range(3)]
        assert not running.done()
        gate.set()
        assert await running and await asyncio.gather(*following) == [(3, 1)] * 3


async def test_torch_threads_are_set_on_the_models_thread() -> None:
    before = torch.get_num_threads()
    async with ModelThread(threads=before + 1) as thread:
        assert await thread.run(torch.get_num_threads) == before + 1


async def test_results_arguments_and_exceptions_come_back() -> None:
    async with ModelThread() as thread:
        assert await thread.run(divmod, 7, 2) == (3, 1)
        assert await thread.run(int, "11", base=2) == 3
        with pytest.raises(ZeroDivisionError):
            await thread.run(divmod, 1, 0)


async def test_a_cancelled_caller_leaves_the_thread_usable() -> None:
    gate = threading.Event()
    async with ModelThread() as thread:
        waiting = asyncio.ensure_future(thread.run(gate.wait, 5.0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        assert await thread.run(divmod, 9, 4) == (2, 1)


async def test_closing_waits_and_is_idempotent() -> None:
    thread = ModelThread()
    done = asyncio.ensure_future(thread.run(lambda: "done"))
    await asyncio.sleep(0)
    assert await done == "done"
    thread.close()
    thread.close()
    with pytest.raises(RuntimeError):
        await thread.run(divmod, 1, 1)


async def test_calls_that_had_not_begun_are_cancelled_by_closing() -> None:
    begun, gate, ran = threading.Event(), threading.Event(), list[int]()
    thread = ModelThread()
    running = thread.run(lambda: begun.set() or gate.wait(5.0))
    await asyncio.to_thread(begun.wait)
    waiting = thread.run(ran.append, 1)
    closing = asyncio.ensure_future(asyncio.to_thread(thread.close))
    while not thread._closed:
        await asyncio.sleep(0.001)
    gate.set()
    await closing
    assert await running is True
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ran == []
