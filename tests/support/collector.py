"""An OTLP receiver in the test's own process: what services send over gRPC, as protobuf spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from slipstream.telemetry.spans import NAME
from slipstream.telemetry.tracing import Clocks, Tracing


@dataclass(frozen=True)
class Collected:
    service: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        """By which the documentation calls it."""
        return str(self.attributes.get(NAME, self.span.name))

    @property
    def id(self) -> bytes:
        return self.span.span_id

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def parent(self) -> bytes:
        return self.span.parent_span_id

    @property
    def began(self) -> float:
        return self.span.start_time_unix_nano / 1e9

    @property
    def ended(self) -> float:
        return self.span.end_time_unix_nano / 1e9

    @property
    def attributes(self) -> dict[str, Any]:
        return read(self.span.attributes)

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.name, read(event.attributes)) for event in self.span.events]

    @property
    def links(self) -> list[bytes]:
        return [link.span_id for link in self.span.links]

    @property
    def failed(self) -> bool:
        return self.span.status.code == trace_pb2.Status.STATUS_CODE_ERROR

    def overlaps(self, other: Collected) -> bool:
        return self.began < other.ended and other.began < self.ended


def read(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.segment_tokens = 0
        """Of traces; 0: spans of every round."""
        self._spans: list[Collected] = []
        self._tracings: list[Tracing] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = read(resource.resource.attributes)["service.name"]
            self._spans += [Collected(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def tracing(self, role: str, clocks: Clocks | None = None) -> Tracing:
        """Tracing of a service that sends its spans here."""
        exporter = OTLPSpanExporter(endpoint=self.address, insecure=True, timeout=60)
        segments = self.segment_tokens
        tracing = Tracing(f"slipstream-{role}", [BatchSpanProcessor(exporter)], clocks, segment_tokens=segments)
        self._tracings.append(tracing)
        return tracing

    async def spans(self) -> list[Collected]:
        """All that were sent until now."""
        for tracing in self._tracings:
            for processor in tracing.processors:
                await asyncio.to_thread(processor.force_flush)
        return list(self._spans)

    def close(self, limit_s: float = 5.0) -> None:
        for tracing in self._tracings:
            tracing.close(limit_s)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.close()
        server.stop(0)
