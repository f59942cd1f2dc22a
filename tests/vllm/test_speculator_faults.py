"""An EAGLE 3 head in vLLM's workers: KV is taken away, a worker is killed in a step, and there are two workers."""

from __future__ import annotations

import signal
import threading
from typing import Any

import psutil
import pytest

from slipstream.engine.engine import EngineLost
from tests.vllm.conftest import open_executor
from tests.vllm.decoding import Case, decode, texts
from tests.vllm.speculated import CASES, TOKENS, Speculated, embedded, near, save_pair, setting, speculate
from tests.vllm.system import gone, until

AT_WORK_S = 0.5
"""Seconds from the beginning of a step to the end of its worker, which is stopped before and so cannot answer."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(pair: tuple[str, str]) -> dict[Case, list[int]]:
    return texts(decode(embedded(pair[0]), CASES))


def opened(pair: tuple[str, str], **options: Any) -> Any:
    target, head = pair
    return open_executor(model=target, vllm_speculator=setting("eagle3", head), kv_tokens=1536, **options)


def begun(executor: Any, steps: int) -> Speculated:
    decoding = Speculated(executor)
    for case in CASES:
        decoding.open(case)
    for _ in range(steps):
        decoding.step()
    assert len(decoding.live) == len(CASES)
    return decoding


def go_on(decoding: Speculated, before: dict[Case, list[int]]) -> None:
    for case, output in before.items():
        decoding.open(case, output)


def accepted_after(decoding: Speculated) -> float:
    greedy = decoding.decoded[CASES[0]]
    return greedy.accepted / max(greedy.drafted, 1)


def test_texts_go_on_where_kv_was_taken_away_and_computed_again(
    pair: tuple[str, str], plain: dict[Case, list[int]]
) -> None:
    """Others' tokens are written over the KV in between, so that both the target's and the head's is computed anew."""
    executor = opened(pair)
    try:
        decoding = begun(executor, 5)
        taken = {case: list(decoding.decoded[case].token_ids) for case in CASES[::2]}
        for case in taken:
            decoding.close(case)
        prompt = tuple((11 + at * 5) % 190 for at in range(60))
        for number in range(40):
            decode(executor, [Case(prompt, CASES[1].sampling, 8, salt=str(number))])
        go_on(decoding, taken)
        assert not any(decoding.live[case].computed for case in taken), "the prefix cache still had it"
        assert texts(decoding.run()) == plain
        assert accepted_after(decoding) > 0.6
        assert executor.kv.blocks_free == executor.kv.blocks_total
    finally:
        executor.close()


def test_texts_go_on_elsewhere_when_a_worker_is_killed_in_the_midst_of_a_step(
    pair: tuple[str, str], plain: dict[Case, list[int]]
) -> None:
    executor = opened(pair)
    try:
        decoding = begun(executor, 5)
        processes = [psutil.Process(pid) for pid in executor.core.worker_pids]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        killing = threading.Timer(AT_WORK_S, lambda: [process.kill() for process in processes])
        killing.start()
        with pytest.raises(EngineLost, match="killed by SIGKILL"):
            decoding.step()
        killing.join()
        until(lambda: gone(processes))
        said = {case: list(each.token_ids) for case, each in decoding.decoded.items()}
    finally:
        executor.close()
    assert all(0 < len(output) < TOKENS and plain[case][: len(output)] == output for case, output in said.items())
    second = opened(pair)
    try:
        going_on = Speculated(second)
        go_on(going_on, said)
        assert texts(going_on.run()) == plain
        assert accepted_after(going_on) > 0.6
    finally:
        second.close()


def test_tensor_parallel_workers_with_a_head_give_the_texts_without_it(
    pair: tuple[str, str], plain: dict[Case, list[int]]
) -> None:
    executor = opened(pair, vllm_args="--block-size 32 --tensor-parallel-size 2")
    try:
        assert len(executor.core.worker_pids) == 2
        decoded = speculate(executor, CASES, seed=3, skipped=0.2)
        assert texts(decoded) == plain
        greedy = decoded[CASES[0]]
        assert greedy.accepted > 0.6 * greedy.drafted > 0.3 * TOKENS
        assert texts(speculate(executor, CASES, near(plain, 0.7), seed=4)) == plain
    finally:
        executor.close()
