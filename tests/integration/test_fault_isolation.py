"""Exceptions in the steps of a real model, in fp32: whoever does not cause them gets the same text, whoever does ends
alone, and with a device that is gone all sessions may go on elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest
import torch

from slipstream.engine.engine import Engine, EngineLost
from slipstream.engine.factory import open_engine
from slipstream.engine.kernels.attention import PagedAttention, States, StepParts
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.kvcache.store import KVStore
from slipstream.engine.torch_engine import TorchEngine
from slipstream.errors import DEVICE_MEMORY, SESSION_FAULT, STEP_FAILED, InvalidArgument
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput
from slipstream.v1 import verifier_pb2
from tests.support.fleet import Decoded, Gateway, gateway, until, verifier
from tests.support.grammars import END, TARGET, tokenizer
from verifier_svc.execution import embedded
from verifier_svc.execution.embedded import EmbeddedExecutor
from verifier_svc.execution.executor import ScheduledSequence, StepOutcome
from verifier_svc.execution.fault_isolation import LONE_TRIES, LOST_STEPS

pytestmark = pytest.mark.mended_faults
CODE = "def read(self, path):\n    with open(path) as file:\n        return file.read()\n\n\ndef read("
PROMPT = tokenizer().encode(CODE).ids
TOKENS = 40
SESSIONS: list[dict[str, Any]] = [
    {"sampling": SamplingParams(temperature=0.0)},
    {"sampling": SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.2, frequency_penalty=0.3)},
    {"sampling": SamplingParams(temperature=1.0, seed=7), "top_logprobs": 2},
    {
        "sampling": SamplingParams(temperature=1.0, seed=11),
        "structure": StructuredOutput("regex", "[a-z ]{60,90}"),
        "stop": [END],
    },
    {"sampling": SamplingParams(temperature=0.0), "max_draft_tokens": 0},
]
"""No two of them have the same prompt (`prompts`)."""


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


def prompts() -> list[list[int]]:
    """Whole blocks of the first two are shared in the prefix cache."""
    return [[*PROMPT, number + 100] for number in range(len(SESSIONS))]


@dataclass
class Faults:
    """Raises `error` at a stage of those passes that `when` names, by number and step."""

    error: Callable[[], BaseException]
    stage: str
    when: Callable[[int, list[ScheduledSequence]], bool]
    passes: int = 0
    raised: int = 0
    armed: bool = False
    calls: int = 0
    """Calls of the stage in the present pass."""

    def strike(self, stage: str, call: int = 1) -> None:
        self.calls += stage == self.stage
        if self.armed and stage == self.stage and self.calls == call:
            self.raised += 1
            raise self.error()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        execute, forward = EmbeddedExecutor.execute, TorchEngine.forward
        judge, keep, write, attend = embedded.judge, KVCache.keep, KVStore.write, PagedAttention.__call__

        def executed(executor: EmbeddedExecutor, step: list[ScheduledSequence]) -> list[StepOutcome]:
            self.passes += 1
            self.calls, self.armed = 0, self.when(self.passes, step)
            self.strike("before")
            return execute(executor, step)

        def written(store: KVStore, layer: int, *states: torch.Tensor) -> None:
            self.strike("amid layers", call=3)
            write(store, layer, *states)

        def attended(layer: PagedAttention, states: States, step: StepParts) -> torch.Tensor:
            self.strike("amid layers", call=3)
            return attend(layer, states, step)

        def forwarded(engine: TorchEngine, *asked: Any) -> Any:
            output = forward(engine, *asked)
            self.strike("after the pass")
            return output

        def judged(*asked: Any) -> Any:
            results = judge(*asked)
            self.strike("judging")
            return results

        def kept(cache: KVCache, *asked: Any) -> None:
            keep(cache, *asked)
            self.strike("keeping", call=2)

        patch.setattr(EmbeddedExecutor, "execute", executed)
        patch.setattr(KVStore, "write", written)
        patch.setattr(PagedAttention, "__call__", attended)
        if self.stage == "amid layers":  # in one call nothing can fail
            patch.setattr(KVStore, "attention_of_all", lambda store, layers: None)
        patch.setattr(TorchEngine, "forward", forwarded)
        patch.setattr(embedded, "judge", judged)
        patch.setattr(KVCache, "keep", kept)


@pytest.fixture(scope="module")
def target() -> Engine:
    return open_engine(TARGET, "float32", 8192)


SETTINGS: dict[str, Any] = {"model": TARGET, "local_drafters": ("ngram",), "prefill_tokens": 16}


@asynccontextmanager
async def served(target: Engine) -> AsyncIterator[Gateway]:
    async with verifier(target, **SETTINGS) as server, gateway(server.address) as client:
        yield client


async def opened(client: Gateway, number: int, **options: Any) -> Decoded:
    asked: dict[str, Any] = {"tokens": TOKENS, "drafters": ["verifier:ngram"]} | SESSIONS[number] | options
    _, decoded = await client.open(prompts()[number], **asked)
    return decoded


async def decode_all(target: Engine) -> list[Decoded]:
    async with served(target) as client:
        decoded = [await opened(client, number) for number in range(len(SESSIONS))]
        await until(lambda: all(each.done.is_set() for each in decoded))
    assert target.kv.blocks_free == target.kv.blocks_total
    return decoded


@pytest.fixture(scope="module")
def truth(target: Engine) -> list[list[int]]:
    decoded = asyncio.run(decode_all(target))
    assert sum(each.accepted for each in decoded) > 0
    return [each.token_ids for each in decoded]


def failure(decoded: Decoded) -> tuple[int, str]:
    assert decoded.end is not None and decoded.end.reason == verifier_pb2.FINISH_REASON_ERROR
    return decoded.end.failure.code, decoded.end.failure.reason


def number_of(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


WORKERS_WORDS = "Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 MiB.', please check the stack"
"""What is left of an exception in a process of vLLM's."""


@pytest.mark.parametrize(
    ("error", "stage"),
    [
        pytest.param(error, stage, marks=() if at % 3 == number else pytest.mark.slow)
        for at, stage in enumerate(("before", "amid layers", "after the pass", "judging", "keeping"))
        for number, error in enumerate((RuntimeError, torch.OutOfMemoryError, Panic))
    ],
)
async def test_steps_that_fail_now_and_then_change_no_text_and_end_no_session(
    target: Engine,
    truth: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: Callable[[], BaseException],
) -> None:
    faults = Faults(error, stage, lambda number, step: number % 4 == 0)
    faults.install(monkeypatch)
    decoded = await decode_all(target)
    assert faults.raised >= 3
    assert [each.token_ids for each in decoded] == truth
    assert not any(each.end.HasField("failure") for each in decoded if each.end is not None)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (RuntimeError, grpc.StatusCode.INTERNAL, SESSION_FAULT),
        (Panic, grpc.StatusCode.INTERNAL, SESSION_FAULT),
        (partial(RuntimeError, WORKERS_WORDS), grpc.StatusCode.RESOURCE_EXHAUSTED, DEVICE_MEMORY),
        (lambda: InvalidArgument("no such token"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 3])
async def test_a_session_that_fails_every_step_ends_alone(
    target: Engine,
    truth: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[], BaseException],
    code: grpc.StatusCode,
    reason: str,
    culprit: int,
) -> None:
    """From its tenth token on."""
    mark, length = prompts()[culprit], len(prompts()[culprit]) + 10

    def poisoned(_: int, step: list[ScheduledSequence]) -> bool:
        tokens = [each.session.tokens for each in step]
        return any(each[: len(mark)] == mark and len(each) >= length for each in tokens)

    faults = Faults(error, "judging", poisoned)
    faults.install(monkeypatch)
    decoded = await decode_all(target)
    assert failure(decoded[culprit]) == (number_of(code), reason)
    assert decoded[culprit].token_ids == truth[culprit][: len(decoded[culprit].token_ids)] != truth[culprit]
    others = [number for number in range(len(SESSIONS)) if number != culprit]
    assert [decoded[number].token_ids for number in others] == [truth[number] for number in others]
    assert faults.raised >= LONE_TRIES


async def test_steps_that_lack_memory_run_in_parts_that_fit_and_faults_are_counted(
    target: Engine, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried whole each time, two passes of five would fail."""
    faults = Faults(torch.OutOfMemoryError, "before", lambda _, step: len(step) > 2)
    faults.install(monkeypatch)
    async with verifier(target, **SETTINGS) as server, gateway(server.address) as client:
        decoded = [await opened(client, number) for number in range(len(SESSIONS))]
        await until(lambda: all(each.done.is_set() for each in decoded))
        counted = server.scheduler.step_faults
    assert [each.token_ids for each in decoded] == truth
    assert 1 <= faults.raised <= faults.passes / 8
    assert counted == {"split": faults.raised, "memory": faults.raised, "session": 0, "device": 0}


async def test_a_session_whose_candidates_fail_goes_on_without_them(
    target: Engine, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(RuntimeError, "before", lambda _, step: any(len(each.selection) for each in step))
    faults.install(monkeypatch)
    assert [each.token_ids for each in await decode_all(target)] == truth
    assert faults.raised


async def test_a_session_that_failed_alone_runs_apart_until_enough_passes_succeed(
    target: Engine, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed once with others, once alone."""
    sizes: list[int] = []
    mark = prompts()[0]

    def twice(_: int, step: list[ScheduledSequence]) -> bool:
        mine = [each for each in step if each.session.tokens[: len(mark)] == mark]
        if faults.raised:
            sizes.extend(len(step) for _ in mine)
        return bool(mine) and len(step) in (1, len(SESSIONS)) and faults.raised < 2

    faults = Faults(RuntimeError, "before", twice)
    faults.install(monkeypatch)
    assert [each.token_ids for each in await decode_all(target)] == truth
    assert faults.raised == 2
    alone = sizes[sizes.index(1) :]
    assert alone[:8] == [1] * 8


async def test_without_a_device_all_sessions_may_go_on_elsewhere_and_the_verifier_ends(
    target: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(RuntimeError, "amid layers", lambda number, _: number > 8)
    faults.install(monkeypatch)
    refused = 0
    with pytest.RaisesGroup(EngineLost, flatten_subgroups=True):
        async with served(target) as client:
            while True:
                decoded = [await opened(client, number) for number in range(2)]
                await until(lambda told=decoded: all(each.done.is_set() for each in told) or broken(client))  # type: ignore[misc]
                if broken(client):
                    await client.broken()
                for each in decoded:
                    assert failure(each) == (number_of(grpc.StatusCode.UNAVAILABLE), STEP_FAILED)
                refused += 1
                assert refused <= LOST_STEPS


def broken(client: Gateway) -> bool:
    return client._reader.done()


async def test_a_device_that_comes_back_serves_on(
    target: Engine, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(RuntimeError, "amid layers", lambda number, _: 8 < number <= 16)
    faults.install(monkeypatch)
    async with served(target) as client:
        first = await opened(client, 0)
        await until(first.done.is_set)
        assert failure(first) == (number_of(grpc.StatusCode.UNAVAILABLE), STEP_FAILED)
        while failed(again := await finished(client, 0, first)):
            pass
    assert first.token_ids + again.token_ids == truth[0]


async def test_only_steps_that_fail_in_a_row_end_the_verifier(target: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    away = False
    Faults(RuntimeError, "before", lambda *_: away).install(monkeypatch)
    async with served(target) as client:
        for turn in range(2 * LOST_STEPS):
            away = turn % 2 == 0
            decoded = await opened(client, 0, tokens=1)
            await until(decoded.done.is_set)
            assert failed(decoded) == away


async def finished(client: Gateway, number: int, before: Decoded) -> Decoded:
    """The rest of a session that is opened again."""
    output = before.token_ids
    decoded = await opened(client, number, output=output)
    await until(decoded.done.is_set)
    return decoded


def failed(decoded: Decoded) -> bool:
    return decoded.end is not None and decoded.end.HasField("failure")
