"""What a gateway counts of its sessions: kinds, outcomes, objectives; and what its store does."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gateway.config import GatewayConfig
from gateway.configured_workers import ConfiguredWorkers
from gateway.sessions.observer import outcome_of
from gateway.sessions.request_stats import RequestStats
from gateway.store.measured import MeasuredStore
from gateway.store.memory import MemoryBackend, MemoryStore
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord
from gateway.store.write_behind import WriteBehindQueue
from gateway.telemetry.metrics_source import MetricsParts, _shares, _workers
from gateway.telemetry.request_metrics import MOST_WORKLOADS, Objectives, RequestMetrics, SessionMetrics
from slipstream.errors import (
    Aborted,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.rpc.multiplexed_stream import ByteCounter
from slipstream.telemetry.metrics_collector import OTHER
from slipstream.v1 import verifier_pb2

CONFIG = GatewayConfig(verifiers=("v:1",), tokenizer="t", drafters=("model=d:1", "ngram=d:2"))


def resolved(workload: str = "", model: str = "m") -> Any:
    return SimpleNamespace(model=SimpleNamespace(name=model), workload=workload)


def session(
    metrics: RequestMetrics, outcome: str, *, ttft_s: float = 0.1, tpot_s: float = 0.1, tokens: int = 5
) -> RequestStats:
    """Count a session that ended so."""
    now = [100.0]
    stats = RequestStats(lambda: now[0], 100.0)
    observer = SessionMetrics(metrics, resolved(), stats)
    observer.run_began()
    now[0] += ttft_s
    for more in (1, tokens - 1):
        if more:
            done = verifier_pb2.Round(token_ids=[1] * more)
            stats.add_round(done)
            observer.round_shown(done)
        now[0] += tpot_s * (tokens - 1) * (more == 1)
    stats.close()
    observer.run_ended(outcome)
    return stats


def test_however_many_workloads_clients_name_there_are_only_so_many_series() -> None:
    metrics = RequestMetrics()
    for number in range(10_000):
        metrics.series_of(resolved(f"kind-{number}"))
    assert len(metrics.series) == MOST_WORKLOADS + 1 and ("m", OTHER) in metrics.series
    assert (
        metrics.series_of(resolved("kind-3"))
        is not metrics.series_of(resolved("kind-9999"))
        is metrics.series_of(resolved("kind-77"))
    )


def test_workloads_that_the_operator_names_cannot_be_crowded_out() -> None:
    metrics = RequestMetrics(workloads=("chat",))
    for number in range(100):
        metrics.series_of(resolved(f"kind-{number}"))
    metrics.series_of(resolved("chat"))
    assert set(metrics.series) == {("m", OTHER), ("m", "chat")}


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (Objectives(), 1),
        (Objectives(ttft_s=0.5, tpot_s=1 / 32), 1),
        (Objectives(ttft_s=0.49), 0),
        (Objectives(tpot_s=0.031), 0),
    ],
)
def test_a_good_request_met_both_objectives(objectives: Objectives, good: int) -> None:
    metrics = RequestMetrics(objectives)
    done = session(metrics, "stop", ttft_s=0.5, tpot_s=1 / 32, tokens=11)
    assert done.tpot_s == 1 / 32
    series = metrics.series["m", ""]
    assert (series.good, series.good_tokens) == (good, 11 * good)
    assert series.outcomes == {"stop": 1}


def test_sessions_under_a_lossy_rule_are_counted() -> None:
    metrics = RequestMetrics()
    for lossy in (True, False, True):
        SessionMetrics(metrics, resolved(), RequestStats(lambda: 0.0, 0.0, lossy=lossy)).run_began()
    assert metrics.series["m", ""].lossy == 2


def test_one_token_has_no_time_per_token_after_it() -> None:
    metrics = RequestMetrics(Objectives(tpot_s=0.001))
    done = session(metrics, "length", ttft_s=0.5, tpot_s=9.0, tokens=1)
    assert done.tpot_s is None and metrics.series["m", ""].good == 1
    (family,) = metrics.tpot.collect()
    assert next(sample.value for sample in family.samples if sample.name.endswith("_count")) == 0


def test_abandoned_and_failed_requests_are_neither_good_nor_timed() -> None:
    metrics = RequestMetrics()
    for outcome in ("disconnected", "cancelled", "unavailable", "failed", "fenced"):
        session(metrics, outcome)
    series = metrics.series["m", ""]
    assert (series.good, sum(series.outcomes.values())) == (0, 5)
    (family,) = metrics.e2e.collect()
    assert next(sample.value for sample in family.samples if sample.name.endswith("_count")) == 0


@pytest.mark.parametrize(
    ("error", "outcome", "refused"),
    [
        (Unavailable("x"), "unavailable", 1),
        (ResourceExhausted("x", reason="SESSIONS"), "unavailable", 1),
        (ResourceExhausted("x", reason="KEY_TOKENS"), "unavailable", 0),
        (Internal("x"), "failed", 1),
        (Aborted("x"), "fenced", 0),
        (InvalidArgument("x"), "invalid", 0),
        (NotFound("x"), "invalid", 0),
    ],
)
def test_ends_and_refusals_are_counted_by_the_side_at_fault(error: SlipstreamError, outcome: str, refused: int) -> None:
    metrics = RequestMetrics()
    with pytest.raises(SlipstreamError), metrics.admitting():
        raise error
    assert (outcome_of(error), metrics.refused) == (outcome, refused)


def test_a_slow_request_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    metrics = RequestMetrics(Objectives(slow_s=1.0))
    session(metrics, "stop")
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "gateway"):
        session(metrics, "stop", tpot_s=0.5)
    (record,) = caplog.records
    assert (record.msg, vars(record)["tokens"], vars(record)["e2e_s"]) == ("slow request", 5, 2.1)


@pytest.mark.parametrize("prices", [("model",), ("model=x",), ("model=-1",), ("model=inf",), ("other=1",)])
def test_prices_that_cannot_be_meant_are_refused(prices: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument, match="GATEWAY_DRAFTER_PRICES"):
        replace(CONFIG, drafter_prices=prices)
    assert replace(CONFIG, drafter_prices=("ngram=0.25",)).prices_of_drafters() == {"ngram": 0.25}


class Slow(MemoryStore):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
        self.open = asyncio.Event()

    async def append(self, *arguments: Any) -> None:
        await self.open.wait()
        await super().append(*arguments)


async def test_the_lag_is_the_age_of_the_oldest_write_that_has_no_answer() -> None:
    now = [10.0]
    slow = Slow()
    store = MeasuredStore(slow, lambda: now[0])
    await store.create(SessionRecord("s", 1, b"", 1, (1,)))
    assert store.lag_s == 0.0
    first = asyncio.create_task(store.append("s", 1, 1, [2]))
    await asyncio.sleep(0)
    now[0] = 12.0
    second = asyncio.create_task(store.append("s", 1, 9, [3]))
    await asyncio.sleep(0)
    now[0] = 13.0
    assert store.lag_s == 3.0
    slow.open.set()
    await first
    with pytest.raises(SlipstreamError):
        await second
    assert store.lag_s == 0.0 and store.errors == {("append", "LOG_MISMATCH"): 1}
    (family,) = store.seconds.collect()
    sums = {sample.labels["operation"]: sample.value for sample in family.samples if sample.name.endswith("_sum")}
    assert sums == {"create": 0.0, "append": 4.0}


class Away(MemoryStore):
    def __init__(self) -> None:
        super().__init__(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
        self.away = True

    async def read(self, session: str, start: int = 0) -> SessionRecord:
        if self.away:
            raise Unavailable("The store is away.") from ConnectionError("DENIED: protected mode\nand so on")
        return await super().read(session, start)


async def test_the_log_reports_once_why_the_store_is_unavailable_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    behind = Away()
    store = MeasuredStore(behind)
    await store.greet()
    for _ in range(2):
        with pytest.raises(Unavailable):
            await store.read("s")
    behind.away = False
    with pytest.raises(NotFound):
        await store.read("s")
    first, second = [record.getMessage() for record in caplog.records]
    assert first.endswith("refused: DENIED: protected mode") and second == "the session store is back"
    assert store.errors == {("read", "UNAVAILABLE"): 2, ("read", "NO_SESSION"): 1}


async def test_writes_that_relaxed_sessions_left_behind_age_until_they_are_written() -> None:
    now, there = [0.0], MemoryStore(MemoryBackend(), owner="me", ttl_s=60, lease_s=60)
    write_behind = WriteBehindQueue(lambda: now[0])
    log = SessionLog(there, SessionRecord("s", 1, b"", 1, (1,)), write_behind=write_behind, grace_s=1)
    await log.create()
    await log.append([2])
    now[0] = 2.0
    await log.append([3])
    now[0] = 5.0
    assert write_behind.lag_s == 5.0
    writing = asyncio.create_task(write_behind.run())
    await write_behind.written(1.0)
    assert write_behind.lag_s == 0.0
    writing.cancel()
    await asyncio.wait([writing])


async def test_workers_that_come_and_go_behind_a_name_are_counted_by_the_name() -> None:
    config = GatewayConfig(
        verifiers=("dns:///v:1", "w:1"),
        tokenizer="t",
        drafters=("model=dns:///d:2", "ngram=dns:///n:3"),
        verifier_price=4.0,
        drafter_prices=("model=1.5",),
    )
    metrics, traffic = RequestMetrics(), ByteCounter()
    router = ConfiguredWorkers(config, "fingerprint", lambda role: MagicMock(), traffic).router(time.monotonic)
    parts = MetricsParts(config, metrics, router, MagicMock(), None, traffic, MagicMock(), MagicMock())
    told = {metric.name: source for metric, source in _workers(parts).items()}
    names = {("verifier", "dns:///v:1"), ("verifier", "w:1"), ("drafter", "model"), ("drafter", "ngram")}
    assert told["slipstream_workers"]() == dict.fromkeys(names, 0)

    async with asyncio.TaskGroup() as tasks:
        for discovery, address in ((router.discoveries[0], "10.0.0.1:1"), (router.discoveries[1], "10.0.0.9:2")):
            discovery._update({address}, tasks)
        for known in (router.verifiers[-1], router.drafters[-1]):
            known._watch.present, known._watch.method = True, "model"
        assert told["slipstream_workers"]() == dict.fromkeys(names, 0) | {
            ("verifier", "dns:///v:1"): 1,
            ("drafter", "model"): 1,
        }
        assert told["slipstream_cost_per_hour"]() == {("verifier",): 4.0, ("drafter",): 1.5}
        assert told["slipstream_drafter_breaker_state"]() == {("model",): 0}
        share = verifier_pb2.DrafterShare(drafter="model@10.0.0.9:2", drafted=2, accepted=1)
        metrics.series_of(resolved()).sums.add_round(
            verifier_pb2.Round(drafted=2, accepted=1, drafters=[share]), speculates=True
        )
        assert _shares(parts, "drafted") == {("m", "model", "model", ""): 2}
        router.drafters[-1]._watch.method = "odd\0" + "d" * 99
        assert _shares(parts, "drafted") == {("m", "model", "odd?" + "d" * 60, ""): 2}
        for number in range(100):
            metrics.drafter_failed(f"model@10.0.0.{number}:2", "LINK_LOST", 1)
        assert metrics.failures == {("model", "LINK_LOST"): 100}
        for discovery in router.discoveries:
            for _, running in discovery._known.values():
                running.cancel()
