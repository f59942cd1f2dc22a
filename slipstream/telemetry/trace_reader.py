"""Traces read back as OTLP JSON, from the files that the roles write or from Jaeger, and as spans."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgument, NotFound, Unavailable
from slipstream.telemetry import spans

TIMEOUT_S = 10.0
# Protobuf's JSON has the names of enumerators, OpenTelemetry's own has their numbers.
ERROR_STATUS = ("STATUS_CODE_ERROR", 2)
SERVER_KIND = ("SPAN_KIND_SERVER", 2)
Document = dict[str, Any]
"""OTLP JSON, `{"resourceSpans": [...]}`; Jaeger's page loads it as a file."""


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """An event of a span."""

    name: str
    at_ns: int
    """Unix nanoseconds."""
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span. Ids are hex, times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a span without a parent."""
    service: str
    """Name of the role, also where `OTEL_SERVICE_NAME` gives it another name in Jaeger."""
    name: str
    """Our stable name of the span."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[ReadEvent, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) of the spans that it links to."""
    error: bool = False
    kind: str = "internal"
    title: str = ""
    """Its name in Jaeger, if that is another one."""


def trace_from_folder(folder: Path, trace_id: str) -> Document:
    """One trace, out of a folder of `.jsonl` files of OTLP JSON. Raises NotFound where no file holds it."""
    found = [
        resource
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
        if trace_id in line and line.endswith("\n")  # else it is being written
        for resource in _only(json.loads(line), trace_id)
    ]
    if not found:
        raise NotFound(
            f"no trace {trace_id} is in {folder}; name the folder of `serve --traces` with --traces or in "
            "SLIPSTREAM_TRACES, or a Jaeger with --jaeger or in SLIPSTREAM_JAEGER.",
            reason="NO_TRACE",
        )
    return {"resourceSpans": found}


def trace_from_jaeger(url: str, trace_id: str) -> Document:
    """One trace from the query API of the Jaeger at `url`. Raises NotFound, and Unavailable where none answers."""
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"{url} is no address of a Jaeger; write http://HOST:16686.")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v3/traces/{trace_id}", timeout=TIMEOUT_S) as response:
            resources = _only(json.load(response)["result"], trace_id)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise NotFound(
                f"{url} has no trace {trace_id}; a collector that samples at the tail sends it a minute later: "
                "try --wait-s 90.",
                reason="NO_TRACE",
            ) from error
        raise Unavailable(f"{url} answered with {error.code}; is it a Jaeger?") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{url} does not answer as a Jaeger does: {error}.") from error
    return {"resourceSpans": resources}


def read_spans(document: Document) -> Iterator[ReadSpan]:
    """The spans of a document, in its order."""
    for resource in document["resourceSpans"]:
        process = _attributes(resource.get("resource", {}))
        role = process.get("slipstream.role")
        service = f"slipstream-{role}" if role else str(process.get("service.name", ""))
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            attributes = _attributes(span)
            yield ReadSpan(
                trace_id=span["traceId"],
                span_id=span["spanId"],
                parent_id=span.get("parentSpanId", ""),
                service=service,
                name=str(attributes.get(spans.NAME, span["name"])),
                began_ns=int(span["startTimeUnixNano"]),
                ended_ns=int(span["endTimeUnixNano"]),
                attributes=attributes,
                events=tuple(
                    ReadEvent(event["name"], int(event["timeUnixNano"]), _attributes(event))
                    for event in span.get("events", ())
                ),
                links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
                error=span.get("status", {}).get("code") in ERROR_STATUS,
                kind="server" if span.get("kind") in SERVER_KIND else "internal",
                title=span["name"],
            )


def _only(document: Document, trace_id: str) -> list[Document]:
    """The resources of a document, with the spans of this trace alone."""
    resources = []
    for resource in document["resourceSpans"]:
        scopes = [
            scope | {"spans": spans}
            for scope in resource["scopeSpans"]
            if (spans := [span for span in scope["spans"] if span["traceId"] == trace_id])
        ]
        if scopes:
            resources.append(resource | {"scopeSpans": scopes})
    return resources


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in of.get("attributes", ())}


def _value(typed: dict[str, Any]) -> Any:
    kind, value = next(iter(typed.items()))
    if kind == "arrayValue":
        return [_value(each) for each in value.get("values", ())]
    return int(value) if kind == "intValue" else value
