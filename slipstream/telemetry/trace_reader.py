"""Traces read back: from files of OTLP JSON, or from what Jaeger serves and its upload tab takes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgument, NotFound, Unavailable

TIMEOUT_S = 10.0
ERROR_STATUS = ("STATUS_CODE_ERROR", 2)
KINDS = {"SPAN_KIND_SERVER": "server", "SPAN_KIND_INTERNAL": "internal"}


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of a span."""

    name: str
    at_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """A span. Ids are hex, moments Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: none."""
    service: str
    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[Happened, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Of other spans: trace and span."""
    error: bool = False
    kind: str = "internal"


def from_folder(folder: Path, trace_id: str) -> list[ReadSpan]:
    """Raises NotFound where no file holds the trace."""
    spans = [
        span
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
        if trace_id in line and line.endswith("\n")  # else it is being written
        for span in from_otlp(json.loads(line))
        if span.trace_id == trace_id
    ]
    if not spans:
        raise NotFound(f"no trace {trace_id} is in {folder}.", reason="NO_TRACE")
    return spans


def from_jaeger_at(url: str, trace_id: str) -> list[ReadSpan]:
    """Raises NotFound, and Unavailable where nothing that is Jaeger answers."""
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument(f"{url} is no address of a Jaeger; write http://HOST:16686.")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/traces/{trace_id}", timeout=TIMEOUT_S) as answer:
            return from_jaeger(json.load(answer))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise NotFound(f"{url} knows no trace {trace_id}.", reason="NO_TRACE") from error
        raise Unavailable(f"{url} answered with {error.code}; is it a Jaeger?") from error
    except (OSError, ValueError, LookupError) as error:
        raise Unavailable(f"{url} does not answer as a Jaeger does: {error}.") from error


def from_otlp(document: dict[str, Any]) -> Iterator[ReadSpan]:
    """The spans of one line of OTLP JSON."""
    for resource in document["resourceSpans"]:
        service = str(_attributes(resource.get("resource", {})).get("service.name", ""))
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            yield ReadSpan(
                trace_id=span["traceId"],
                span_id=span["spanId"],
                parent_id=span.get("parentSpanId", ""),
                service=service,
                name=span["name"],
                began_ns=int(span["startTimeUnixNano"]),
                ended_ns=int(span["endTimeUnixNano"]),
                attributes=_attributes(span),
                events=tuple(
                    Happened(event["name"], int(event["timeUnixNano"]), _attributes(event))
                    for event in span.get("events", ())
                ),
                links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
                error=span.get("status", {}).get("code") in ERROR_STATUS,
                kind=KINDS.get(span.get("kind", ""), "internal"),
            )


def to_jaeger(spans: Iterable[ReadSpan]) -> dict[str, Any]:
    """The document that Jaeger's upload tab reads, microseconds and all."""
    spans = list(spans)
    names = {service: f"p{number}" for number, service in enumerate(sorted({span.service for span in spans}), 1)}
    return {
        "data": [
            {
                "traceID": spans[0].trace_id,
                "spans": [_to_jaeger(span, names[span.service]) for span in spans],
                "processes": {name: {"serviceName": service, "tags": []} for service, name in names.items()},
            }
        ]
    }


def from_jaeger(document: dict[str, Any]) -> list[ReadSpan]:
    trace = document["data"][0]
    return [_from_jaeger(span, trace["processes"][span["processID"]]["serviceName"]) for span in trace["spans"]]


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in of.get("attributes", ())}


def _value(typed: dict[str, Any]) -> Any:
    kind, value = next(iter(typed.items()))
    if kind == "arrayValue":
        return [_value(each) for each in value.get("values", ())]
    return int(value) if kind == "intValue" else value


def _to_jaeger(span: ReadSpan, process: str) -> dict[str, Any]:
    references = [("FOLLOWS_FROM", *link) for link in span.links]
    if span.parent_id:
        references.insert(0, ("CHILD_OF", span.trace_id, span.parent_id))
    tags = span.attributes | {"span.kind": span.kind} | ({"error": True} if span.error else {})
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": [dict(zip(("refType", "traceID", "spanID"), each, strict=True)) for each in references],
        "startTime": span.began_ns // 1000,
        "duration": (span.ended_ns - span.began_ns) // 1000,
        "tags": _tags(tags),
        "logs": [
            {"timestamp": event.at_ns // 1000, "fields": _tags({"event": event.name} | event.attributes)}
            for event in span.events
        ],
        "processID": process,
        "warnings": None,
    }


def _from_jaeger(span: dict[str, Any], service: str) -> ReadSpan:
    tags = {tag["key"]: tag["value"] for tag in span["tags"]}
    references = [(each["refType"], each["traceID"], each["spanID"]) for each in span["references"]]
    parent = next((name for kind, trace, name in references if kind == "CHILD_OF"), "")
    began_ns = span["startTime"] * 1000
    events = []
    for entry in span["logs"] or ():
        fields = {each["key"]: each["value"] for each in entry["fields"]}
        events.append(Happened(fields.pop("event", ""), entry["timestamp"] * 1000, fields))
    return ReadSpan(
        trace_id=span["traceID"],
        span_id=span["spanID"],
        parent_id=parent,
        service=service,
        name=span["operationName"],
        began_ns=began_ns,
        ended_ns=began_ns + span["duration"] * 1000,
        error=tags.pop("error", False) in (True, "true"),
        kind=tags.pop("span.kind", "internal"),
        attributes=tags,
        events=tuple(events),
        links=tuple((trace, name) for kind, trace, name in references if kind == "FOLLOWS_FROM"),
    )


JAEGER_TYPES = {bool: "bool", int: "int64", float: "float64"}


def _tags(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "type": JAEGER_TYPES[type(value)], "value": value}
        if type(value) in JAEGER_TYPES
        else {"key": key, "type": "string", "value": value if isinstance(value, str) else json.dumps(value)}
        for key, value in attributes.items()
    ]
