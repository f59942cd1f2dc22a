"""Exporters of spans: to an OpenTelemetry collector, to files on this machine, or none."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from slipstream.config import from_env
from slipstream.errors import InvalidArgument
from slipstream.telemetry.segments import SEGMENT_TOKENS
from slipstream.telemetry.tracing import Tracing

EXPORT_TIMEOUT_S = 1.5
"""Most seconds to export one batch, retries included; the library's 10 s would delay a process's end."""
SEND_EVERY_MS = 1000
FILE_BYTES = 64 << 20
"""Size at which a file of spans replaces the `.old` one and a new file begins."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
READ = ("OTEL_BSP_", "OTEL_EXPORTER_OTLP_")
"""Prefixes of the variables that the library itself reads."""
SEGMENTS_OF = {"notable": SEGMENT_TOKENS, "all": 0}
"""Tokens of a segment, by the setting."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Tracing settings of every role (`SLIPSTREAM_TRACE_*`), besides the standard `OTEL_*`."""

    folder: str = ""
    """Folder for files of spans, which `slipstream trace` reads; empty writes none."""
    rounds: str = "notable"
    """Rounds that have spans of their own in a gateway's traces: `notable` or `all`."""
    keep_percent: float = 100.0
    """The collector's `KEEP_PERCENT`: exemplars of a gateway's histograms name only traces that it keeps."""


@asynccontextmanager
async def tracing_from_env(service: str) -> AsyncIterator[Tracing | None]:
    """Yields the process's tracing, or None where nothing is traced; exports remaining spans at the end, within a
    second.

    Raises InvalidArgument for settings that this process does not support.
    """
    exporters, batches = _batches(service, os.environ)
    config = from_env(TraceConfig, "SLIPSTREAM_TRACE_", os.environ)
    rounds, keep = config.rounds, config.keep_percent
    if rounds not in SEGMENTS_OF:
        raise InvalidArgument(f"SLIPSTREAM_TRACE_ROUNDS={rounds!r}; choose notable or all.")
    if not 0.0 <= keep <= 100.0:
        raise InvalidArgument(f"SLIPSTREAM_TRACE_KEEP_PERCENT={keep:g}; choose 0 to 100.")
    sent = lambda: sum(each.sent for each in exporters)  # noqa: E731
    tokens = SEGMENTS_OF[rounds]
    tracing = Tracing(service, batches, sent=sent, segment_tokens=tokens, keep_percent=keep) if batches else None
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def _batches(service: str, environ: Mapping[str, str]) -> tuple[list[Counted], list[BatchSpanProcessor]]:
    try:
        every_ms = float(environ.get("OTEL_BSP_SCHEDULE_DELAY", SEND_EVERY_MS))
        exporters = [Counted(each) for each in _exporters(service, environ)]
        return exporters, [BatchSpanProcessor(each, schedule_delay_millis=every_ms) for each in exporters]
    except (ValueError, InvalidCompressionValueException) as error:
        read = ", ".join(sorted(name for name in environ if name.startswith(READ)))
        raise InvalidArgument(f"one of {read} cannot be read: {error}") from error


def _exporters(service: str, environ: Mapping[str, str]) -> Iterator[SpanExporter]:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    wanted = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if wanted not in ("", "otlp", "none"):
        raise InvalidArgument(f"OTEL_TRACES_EXPORTER={wanted!r}; choose otlp or none.")
    if wanted == "otlp" or (not wanted and any(environ.get(name) for name in ENDPOINTS)):
        if other := {environ[name] for name in PROTOCOLS if name in environ} - {"grpc"}:
            raise InvalidArgument(
                f"OTLP over {other.pop()!r} is not supported; give the address of a collector's port for grpc."
            )
        timed = any(name in environ for name in TIMEOUTS)
        yield OTLPSpanExporter(timeout=None if timed else EXPORT_TIMEOUT_S)
    if folder := from_env(TraceConfig, "SLIPSTREAM_TRACE_", environ).folder:
        yield FileExporter(Path(folder), service)


class Counted(SpanExporter):
    """An exporter that counts the spans it exported."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class FileExporter(SpanExporter):
    """Writes lines of OTLP JSON, as a collector's `file` exporter does."""

    def __init__(self, folder: Path, service: str) -> None:
        """Raises InvalidArgument for a folder that cannot be created or written."""
        self._path = folder / f"{service}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise InvalidArgument(f"SLIPSTREAM_TRACE_FOLDER={folder} cannot be written: {error.strerror}.") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = MessageToDict(encode_spans(spans), always_print_fields_with_no_presence=False)
        for scope in (scope for resource in lines["resourceSpans"] for scope in resource["scopeSpans"]):
            for span in scope["spans"]:
                _ids_to_hex(span)
                for link in span.get("links", ()):
                    _ids_to_hex(link)
        if self._path.stat().st_size > FILE_BYTES:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
        with self._path.open("a") as file:
            file.write(json.dumps(lines, separators=(",", ":")) + "\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def _ids_to_hex(named: dict[str, Any]) -> None:
    """Converts ids from base64, which protobuf's JSON has, to hex, which OTLP's JSON has."""
    for field in ("traceId", "spanId", "parentSpanId"):
        if field in named:
            named[field] = base64.b64decode(named[field]).hex()
