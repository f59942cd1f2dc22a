"""Which traces the collector hands to Jaeger, by our files of both, and for how long they lie there."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from gateway.telemetry.kept_traces import kept_at_rate
from slipstream.telemetry import spans
from tests.cluster.programs import running
from tests.support.loopback_addresses import HOST, free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DECISION_S = 2
PATIENCE_S = 120
CROWD, LARGE = 20, 1000
"""Late requests in one moment, and spans of each: 0.9 MB, of which the burst takes eight."""


class Pipeline:
    """A collector that decides soon, and a Jaeger behind it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._in, self._between, self._page = free_port(), free_port(), free_port()

    @contextmanager
    def jaeger(self) -> Iterator[subprocess.Popen[bytes]]:
        settings = yaml.safe_load((DEPLOY / "jaeger/jaeger.yaml").read_text())
        settings["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] = f"{HOST}:{self._between}"
        query = settings["extensions"]["jaeger_query"]
        query["http"]["endpoint"], query["grpc"]["endpoint"] = f"{HOST}:{self._page}", f"{HOST}:{free_port()}"
        with self._running("jaeger", settings, JAEGER_FOLDER=str(self._folder / "store")) as process:
            wait(lambda: self.spans_of("0" * 31 + "1") == 0)
            yield process

    @contextmanager
    def collector(self, keep_percent: int = 0) -> Iterator[None]:
        settings = yaml.safe_load((DEPLOY / "otel/collector.yaml").read_text())
        settings["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] = f"{HOST}:{self._in}"
        settings["processors"]["tail_sampling"]["decision_wait"] = f"{DECISION_S}s"
        elsewhere = {"KEEP_PERCENT": str(keep_percent), "JAEGER_ENDPOINT": f"{HOST}:{self._between}"}
        with self._running("otelcol", settings, **elsewhere):
            yield

    @contextmanager
    def _running(self, name: str, settings: dict[str, Any], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        settings["service"]["telemetry"] = {"metrics": {"level": "none"}}  # else both listen on one port
        for extension in ("health_check", "healthcheckv2"):
            if extension in settings["extensions"]:
                settings["service"]["extensions"].remove(extension)
                del settings["extensions"][extension]
        (file := self._folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        with running(self._folder, name, f"--config={file}", **environment) as process:
            yield process

    def send(self, number: int = 1, *, failed: bool = False, padding: int = 0, **attributes: bool) -> str:
        """A trace of so many spans. `attributes` of its first one: those of a request that are true. Returns its id."""
        trace, now = os.urandom(16), time.time_ns()
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = spans.SERVICES[0]
        scope = resource.scope_spans.add()
        for _ in range(number):
            span = scope.spans.add(trace_id=trace, span_id=os.urandom(8), name=spans.ROUND)
            span.start_time_unix_nano, span.end_time_unix_nano = now, now
            span.attributes.add(key="padding").value.string_value = "." * padding
        for key in attributes:
            scope.spans[0].attributes.add(key=getattr(spans, key)).value.bool_value = True
        if failed:
            scope.spans[0].status.code = Status.STATUS_CODE_ERROR
        with grpc.insecure_channel(f"{HOST}:{self._in}") as channel:
            TraceServiceStub(channel).Export(request, timeout=PATIENCE_S, wait_for_ready=True)  # type: ignore[no-untyped-call]
        return trace.hex()

    def spans_of(self, trace: str) -> int | None:
        """Number of its spans in Jaeger; None where Jaeger does not answer."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._page}/api/traces/{trace}", timeout=PATIENCE_S) as page:
                return len(json.load(page)["data"][0]["spans"])
        except urllib.error.HTTPError as error:
            return 0 if error.code == 404 else None
        except OSError:
            return None


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.1)


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path)


def test_remarkable_traces_are_kept_at_a_rate_and_are_there_after_a_crash(pipeline: Pipeline) -> None:
    with pipeline.jaeger() as crashing, pipeline.collector():
        ordinary = pipeline.send()
        kept = [pipeline.send(LATE=True), pipeline.send(failed=True), pipeline.send(ASKED=True)]
        crowd = [pipeline.send(LARGE, padding=850, LATE=True) for _ in range(CROWD)]
        last = pipeline.send(ASKED=True)
        for trace in (*kept, last):
            wait(lambda trace=trace: pipeline.spans_of(trace) == 1)  # type: ignore[misc]
        # What was sent before the last one was decided before it.
        whole = [trace for trace in crowd if pipeline.spans_of(trace) == LARGE]
        assert CROWD // 4 <= len(whole) <= CROWD // 2
        assert pipeline.spans_of(ordinary) == 0
        crashing.kill()
        crashing.wait()
        with pipeline.jaeger():
            assert [pipeline.spans_of(trace) for trace in (*kept, last)] == [1] * 4
            assert [pipeline.spans_of(trace) for trace in whole] == [LARGE] * len(whole)


def test_gateways_name_the_ordinary_traces_that_the_collector_keeps(pipeline: Pipeline) -> None:
    """Exemplars: both compute the same of a trace's id."""
    with pipeline.jaeger(), pipeline.collector(keep_percent=30):
        sent = [pipeline.send() for _ in range(60)]
        last = pipeline.send(ASKED=True)
        wait(lambda: pipeline.spans_of(last) == 1)
        named = {trace for trace in sent if kept_at_rate(int(trace, 16), 30.0)}
        wait(lambda: all(pipeline.spans_of(trace) == 1 for trace in named))
        assert {trace for trace in sent if pipeline.spans_of(trace)} == named
        assert 6 <= len(named) <= 32
