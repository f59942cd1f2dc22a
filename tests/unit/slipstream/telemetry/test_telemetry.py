"""Metrics as they are scraped, labels that others choose, and logs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import shutil
import socket
import subprocess
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from prometheus_client import generate_latest
from structlog.contextvars import bound_contextvars

from slipstream.errors import InvalidArgument, Unavailable
from slipstream.telemetry import logs, metrics, metrics_server
from slipstream.telemetry.metrics_collector import (
    MAX_LABEL_CHARACTERS,
    OTHER,
    BoundedLabels,
    MetricsCollector,
    Source,
    clean_label,
)
from slipstream.telemetry.metrics_server import exposing
from tests.support.scraping import parse, scrape

FREE = "127.0.0.1:0"
TRACE = 0xABCDEF0123456789ABCDEF0123456789
HOSTILE = ['"', "\\", "\n", 'a"} 1\nvllm:x{y="', "\x00", "\u2028", '{le="+Inf"}', "ä" * 64, " ", "\\n", "#", "\ud7ff"]


def sources(**instead: Source) -> dict[metrics.Metric, Source]:
    """Of a drafter that has done nothing."""
    of_role = [
        metric for metric in metrics.DECLARED if "drafter" in metric.roles and metric.name not in metrics.DEPRECATED
    ]
    empty: dict[metrics.Metric, Source] = {
        metric: metric.histogram() if metric.kind == "histogram" else (dict if metric.labels else float)
        for metric in of_role
    }
    return empty | {metric: instead[metric.name] for metric in of_role if metric.name in instead}


@contextmanager
def traced() -> Iterator[None]:
    with use_span(NonRecordingSpan(SpanContext(TRACE, 7, False, TraceFlags(TraceFlags.SAMPLED)))):
        yield


def test_every_metric_is_declared_once_and_well() -> None:
    names = [metric.name for metric in metrics.DECLARED]
    assert len(names) == len(set(names)) > 50
    for metric in metrics.DECLARED:
        assert re.fullmatch(r"(slipstream_|vllm:|gen_ai_)[a-z_0-9]+", metric.name)
        assert metric.help.endswith(".") and metric.roles
        assert (metric.kind == "counter") == metric.name.endswith("_total") or metric.name in metrics.DEPRECATED
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_missing_or_undeclared_metrics_of_a_role_are_an_error() -> None:
    complete = sources()
    with pytest.raises(ValueError, match="slipstream_drafter_sessions"):
        MetricsCollector(
            "drafter", {metric: source for metric, source in complete.items() if metric != metrics.DRAFTER_SESSIONS}
        )
    with pytest.raises(ValueError, match="slipstream_rounds_total"):
        MetricsCollector("drafter", complete | {metrics.ROUNDS: float})


def test_a_deprecated_metric_has_the_numbers_of_the_present_one() -> None:
    meter = MetricsCollector("drafter", sources(slipstream_drafter_sent_candidates_total=lambda: 7))
    meter.read()
    page = generate_latest(meter.registry).decode()
    assert "slipstream_drafter_sent_candidates_total 7.0" in page
    assert "# TYPE slipstream_drafter_told_tokens_total counter" in page
    assert "slipstream_drafter_told_tokens_total 7.0" in page


def test_a_deprecated_histogram_has_the_buckets_and_labels_of_the_present_one() -> None:
    seconds = metrics.TEXT_JOB_SECONDS.histogram()
    old = next(metric for metric in metrics.DECLARED if metric.name == "slipstream_work_seconds")
    declared = [
        metric for metric in metrics.DECLARED if "gateway" in metric.roles and metric.name not in metrics.DEPRECATED
    ]
    made: dict[metrics.Metric, Source] = {
        metric: metric.histogram() if metric.kind == "histogram" else (dict if metric.labels else float)
        for metric in declared
    }
    meter = MetricsCollector("gateway", made | {metrics.TEXT_JOB_SECONDS: seconds})
    seconds.labels("encode").observe(0.2)
    scraped = {family.name: family for family in meter.registry.collect()}
    present, deprecated = (
        {
            (sample.name.removeprefix(name), *sorted(sample.labels.items())): sample.value
            for sample in scraped[name].samples
        }
        for name in (metrics.TEXT_JOB_SECONDS.name, old.name)
    )
    assert deprecated == present and len(present) > len(old.buckets)


async def test_a_scrape_reads_current_values_in_both_formats() -> None:
    sessions = [3]
    meter = MetricsCollector("drafter", sources(slipstream_drafter_sessions=lambda: sessions[0]))
    async with exposing(meter, FREE) as address:
        assert (await scrape(address)).value("slipstream_drafter_sessions") == 3
        sessions[0] = 4
        plain = await scrape(address, "text/plain")
        assert plain.value("slipstream_drafter_sessions") == 4 and "# EOF" not in plain.text
    with pytest.raises(urllib.error.URLError):
        await scrape(address)


async def test_a_loop_that_is_stuck_fails_its_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.telemetry.metrics_server.READ_S", 0.05)
    pauses = [0.5, 0.0]

    def slowly() -> float:
        time.sleep(pauses.pop(0))
        return 1.0

    async with exposing(MetricsCollector("drafter", sources(slipstream_drafter_sessions=slowly)), FREE) as address:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await scrape(address)
        monkeypatch.undo()
        assert (await scrape(address)).value("slipstream_drafter_sessions") == 1


@pytest.mark.parametrize("listen", ["9464", "host:port", ":9464"])
async def test_an_invalid_listen_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidArgument):
        async with exposing(MetricsCollector("drafter", sources()), listen):
            pass


async def test_a_metrics_port_in_use_is_a_typed_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Unavailable):
        async with exposing(MetricsCollector("drafter", sources()), f"127.0.0.1:{taken.getsockname()[1]}"):
            pass


async def test_more_scrapes_at_once_than_there_is_room_for_are_turned_away() -> None:
    async with exposing(MetricsCollector("drafter", sources()), FREE) as address:
        host, _, port = address.partition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(8)]
        try:
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                await scrape(address)
        finally:
            for each in idle:
                each.close()
        async with asyncio.timeout(60):
            while True:
                try:
                    await scrape(address)
                    break
                except (urllib.error.URLError, ConnectionError):
                    await asyncio.sleep(0.05)


async def test_a_scrape_that_arrives_byte_by_byte_is_closed_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SCRAPE_S", 0.5)
    async with exposing(MetricsCollector("drafter", sources()), FREE) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"G")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1), 0.05)
        writer.transport.abort()


async def test_an_observation_leads_scrapers_to_its_trace() -> None:
    seconds = metrics.PASS_SECONDS.histogram()
    seconds.observe(0.003)
    seconds.observe(0.003, {"trace_id": f"{TRACE:032x}"})
    async with exposing(MetricsCollector("drafter", sources(slipstream_drafter_pass_seconds=seconds)), FREE) as address:
        page = await scrape(address)
    found = [
        sample.exemplar.labels for sample in page.samples("slipstream_drafter_pass_seconds_bucket") if sample.exemplar
    ]
    assert found == [{"trace_id": f"{TRACE:032x}"}]
    assert page.value("slipstream_drafter_pass_seconds_count") == 2


def test_only_the_first_values_of_a_label_keep_their_names() -> None:
    names = BoundedLabels(3)
    assert [names(each) for each in "abcdabz"] == ["a", "b", "c", OTHER, "a", "b", OTHER]
    known = BoundedLabels(3, ["chat"])
    assert [known(each) for each in ("junk", "chat", "junk2")] == [OTHER, "chat", OTHER]


@given(st.text())
def test_a_clean_label_is_short_and_printable(value: str) -> None:
    assert len(clean_label(value)) <= MAX_LABEL_CHARACTERS and clean_label(value).isprintable()
    assert clean_label(clean_label(value)) == clean_label(value)


async def test_hostile_labels_stay_labels() -> None:
    names = BoundedLabels(len(HOSTILE))
    counts: Counter[tuple[str, ...]] = Counter()
    for number, value in enumerate(HOSTILE):
        counts[names(value), "OK", "x"] += 1 + number
    meter = MetricsCollector("drafter", sources(slipstream_rpc_errors_total=lambda: counts))
    async with exposing(meter, FREE) as address:
        for accept in ("application/openmetrics-text", "text/plain"):
            page = await scrape(address, accept)
            assert page.value("slipstream_rpc_errors_total") == sum(range(1, len(HOSTILE) + 1))
            assert {sample.labels["method"] for sample in page.samples("slipstream_rpc_errors_total")} == {
                clean_label(value) for value in HOSTILE
            }
    if promtool := shutil.which("promtool"):
        checked = subprocess.run([promtool, "check", "metrics"], input=page.text, text=True, capture_output=True)
        assert checked.returncode in (0, 3) and "error while linting" not in checked.stderr, checked.stderr


# Logs.


@pytest.fixture
def root() -> Iterator[None]:
    """Puts the process' logging back."""
    logger = logging.getLogger()
    handlers, level = logger.handlers, logger.level
    levels = {name: logging.getLogger(name).level for name in ("slipstream", "gateway", "verifier_svc", "drafter_svc")}
    yield
    logging.captureWarnings(False)
    logger.handlers, logger.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def written(*records: tuple[str, int, str, dict[str, Any]], level: str = "info") -> list[dict[str, Any]]:
    stream = io.StringIO()
    logs.configure("gateway", level, "auto", stream)
    for name, severity, message, extra in records:
        logging.getLogger(name).log(severity, message, extra=extra)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.usefixtures("root")
def test_a_line_of_the_log_is_one_object_with_role_session_and_trace() -> None:
    with traced(), bound_contextvars(session="s1"):
        (line,) = written(("gateway.sessions.run", logging.WARNING, "two\nlines", {"e2e_s": 3.5}))
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "two\nlines",
        "level": "warning",
        "logger": "gateway.sessions.run",
        "role": "gateway",
        "session": "s1",
        "trace_id": f"{TRACE:032x}",
        "e2e_s": 3.5,
    }


@pytest.mark.usefixtures("root")
def test_the_level_applies_to_our_own_modules_and_libraries_log_warnings_alone() -> None:
    records: list[tuple[str, int, str, dict[str, Any]]] = [
        (name, severity, f"{name} {severity}", {})
        for name in ("gateway.x", "grpc._cython")
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING)
    ]
    assert [line["event"] for line in written(*records)] == ["gateway.x 20", "gateway.x 30", "grpc._cython 30"]
    assert [line["event"] for line in written(*records, level="debug")][:2] == ["gateway.x 10", "gateway.x 20"]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("format", ["json", "text"])
def test_a_traceback_has_no_values_of_variables(format: str) -> None:
    stream, prompt = io.StringIO(), "xyzzy" + "plugh"
    logs.configure("gateway", "debug", format, stream)
    try:
        print(1 // len(prompt[5:5]))
    except ZeroDivisionError as error:
        logging.getLogger("gateway").error("it failed", exc_info=error)
    assert "ZeroDivisionError" in stream.getvalue() and "it failed" in stream.getvalue()
    assert prompt not in stream.getvalue()


@pytest.mark.parametrize(("level", "format"), [("loud", "json"), ("info", "xml"), ("INFO", "json")])
def test_unknown_settings_of_logs_are_refused(level: str, format: str) -> None:
    with pytest.raises(InvalidArgument):
        logs.check(level, format)


def test_plain_pages_are_parsed_by_these_tests_too() -> None:
    assert parse('# TYPE x gauge\nx{a="b"} 2\n').value("x", a="b") == 2
