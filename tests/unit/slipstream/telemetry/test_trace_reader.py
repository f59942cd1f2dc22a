"""Traces read back: from files, from Jaeger, exported as OTLP JSON, and on the terminal."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.errors import InvalidArgument, NotFound, Unavailable
from slipstream.telemetry import spans
from slipstream.telemetry.trace_reader import ReadEvent, ReadSpan, read_spans, trace_from_folder, trace_from_jaeger
from slipstream.telemetry.waterfall import waterfall

ID = "0123456789abcdef" * 2
MS = 1_000_000


def span(name: str, number: int, parent: int, began: int, took: int, **told: Any) -> ReadSpan:
    service = {"draft": 2, "verify": 1, "prefill": 1}.get(name, 0)
    told["attributes"] = {f"slipstream.{key}": value for key, value in told.pop("notes", {}).items()}
    began, took = (1_700_000_000_000 + began) * MS, took * MS
    parent_id = f"{parent:016x}" if parent else ""
    return ReadSpan(ID, f"{number:016x}", parent_id, spans.SERVICES[service], name, began, began + took, **told)


TRACE = [
    span("verify", 5, 4, 40, 20, notes={"drafted": 4, "accepted": 2, "wire_s": 0.0031}),
    span("round", 4, 1, 35, 30, notes={"round": 1, "miss": "diverged"}),
    span("generate", 1, 0, 0, 100, events=(ReadEvent("drafter.lost", 0),)),
    span("draft", 6, 4, 36, 26, notes={"drafter": "ngram", "discarded": True}),
    span("round", 2, 1, 0, 40, notes={"round": 0}, error=True),
    span("verify", 7, 99, 90, 5),
]


def lines(rounds: range | None = None) -> list[str]:

    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(waterfall(TRACE, rounds))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_waterfall_stands_in_order_of_time_parents_first() -> None:
    head, *rows = lines()
    assert head.split() == ["span", "at", "ms", "took", "ms"]
    starts = [(len(row) - len(row.lstrip()), *row.split()[:2]) for row in rows]
    assert starts == [
        (0, "generate", "0.0"),
        (2, "round", "0"),
        (2, "round", "1"),
        (4, "draft", "ngram"),
        (4, "verify", "40.0"),
        (0, "verify", "90.0"),  # whose round never came
    ]
    assert rows[4].endswith("drafted 4, accepted 2, wire 3.1 ms")
    assert rows[3].endswith("discarded true")
    assert rows[2].endswith("miss diverged")
    assert rows[0].endswith("drafter.lost")
    bars = [row.index("█") for row in rows]
    assert bars[0] == bars[1] < bars[2] <= bars[3] <= bars[4] < bars[5]


def test_chosen_rounds_alone_are_drawn_as_wide_as_there_is_room() -> None:
    _, *rows = lines(range(1, 2))
    assert [row.split()[0] for row in rows] == ["round", "draft", "verify", "verify"]
    assert rows[0].split()[2] == "0.0"


def test_segments_are_named_by_their_rounds_and_chosen_by_them() -> None:
    shares = ["model 9/20", "ngram 0/9"]
    trace = [
        span("generate", 1, 0, 0, 100, kind="server", title="text_completion m"),
        span("rounds", 2, 1, 0, 40, notes={"round": 0, "rounds": 8, "accepted_by_drafter": shares}),
        span("verify rounds", 3, 2, 0, 40, notes={"rounds": 8, "compute_s": 0.02}),
        span("round", 4, 2, 5, 9, notes={"round": 3, "because": "slow"}),
        span("rounds", 5, 1, 40, 60, notes={"round": 8, "rounds": 2, "misses": ["diverged 2"]}),
    ]

    def printed(rounds: range | None) -> list[str]:
        console = Console(width=200, color_system=None)
        with console.capture() as capture:
            console.print(waterfall(trace, rounds, 200))
        return [line.rstrip() for line in capture.get().splitlines()[1:]]

    names = [row[: row.index("  ", len(row) - len(row.lstrip()))].strip() for row in printed(None)]
    assert names == ["text_completion m", "rounds 0-7", "verify rounds", "round 3", "rounds 8-9"]
    assert printed(None)[1].endswith("accepted_by_drafter model 9/20, ngram 0/9")
    chosen = [" ".join(row.split()[:2]) for row in printed(range(3, 4))]
    assert chosen == ["rounds 0-7", "verify rounds", "round 3"]
    [last] = printed(range(9, 99))
    assert last.strip().startswith("rounds 8-9") and last.endswith("misses diverged 2")


def test_the_picture_in_the_document_is_drawn_from_the_trace_beside_it(tmp_path: Path) -> None:
    picture, folder = tmp_path / "waterfall.svg", Path(__file__).resolve().parents[4] / "docs" / "trace"
    asked = ["trace", "2053ddb79e3fa4844fec70569864857e", "--traces", str(folder), "--svg", str(picture)]
    printed = CliRunner().invoke(app, asked)
    assert printed.exit_code == 0 and "rounds 163-347" in printed.output
    assert picture.read_text("utf-8") == (folder / "waterfall.svg").read_text("utf-8")
    picture.unlink()
    data = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert data["trace_id"] == asked[1] and len(data["spans"]) == len(printed.output.splitlines()) - 1
    assert {"depth", "service", "name", "began_ns", "ended_ns", "attributes"} <= set(data["spans"][0])
    assert picture.exists()  # --json stands for the lines alone


OTLP = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "slipstream-gateway"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": ID,
                            "spanId": "a" * 16,
                            "name": "generate",
                            "kind": "SPAN_KIND_SERVER",
                            "startTimeUnixNano": "1000",
                            "endTimeUnixNano": "5000",
                            "status": {"code": "STATUS_CODE_ERROR"},
                            "attributes": [
                                {"key": "n", "value": {"intValue": "7"}},
                                {"key": "words", "value": {"arrayValue": {"values": [{"stringValue": "stop"}]}}},
                            ],
                            "events": [{"name": "lost", "timeUnixNano": "2000"}],
                        }
                    ]
                }
            ],
        }
    ]
}


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_names_and_times_are_whole_on_a_narrow_terminal(width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(waterfall(TRACE, None, width))
    narrow = capture.get().splitlines()
    assert [row.split()[:2] for row in narrow] == [row.split()[:2] for row in lines()]
    assert all(len(row) <= width and ("█" in row or "took ms" in row) for row in narrow)


def test_rounds_that_are_not_there_are_a_typed_error() -> None:
    with pytest.raises(NotFound, match="no such rounds"):
        waterfall([], range(99, 100))


def test_a_line_of_otlp_is_read() -> None:
    [read] = read_spans(OTLP)
    assert (read.service, read.name, read.kind, read.error) == ("slipstream-gateway", "generate", "server", True)
    assert read.attributes == {"n": 7, "words": ["stop"]}
    assert read.events == (ReadEvent("lost", 2000),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slipstream-gateway-1.jsonl").write_text(json.dumps(OTLP) + "\n")
    return tmp_path


def test_the_command_prints_and_exports(folder: Path) -> None:
    printed = CliRunner().invoke(app, ["trace", ID, "--traces", str(folder)])
    assert printed.exit_code == 0, printed.output
    assert "generate" in printed.output
    exported = CliRunner().invoke(app, ["trace", "export", ID, "--traces", str(folder)])
    assert json.loads(exported.output) == OTLP


def test_an_export_holds_every_span_of_the_trace_and_of_no_other(tmp_path: Path) -> None:
    def line(service: str, *spans: dict[str, str]) -> str:
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
        return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}) + "\n"

    def one(trace: str, number: int) -> dict[str, str]:
        times = {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
        return {"traceId": trace, "spanId": f"{number:016x}", "name": f"span {number}"} | times

    other = "f" * 32
    (tmp_path / "a.jsonl").write_text(line("gateway", one(ID, 1), one(other, 2)) + line("gateway", one(ID, 3)))
    (tmp_path / "b.jsonl").write_text(
        line("verifier", one(other, 4)) + line("verifier", one(ID, 5)) + "{half a line " + ID
    )
    exported = CliRunner().invoke(app, ["trace", "export", ID, "--traces", str(tmp_path)])
    found = [(span.service, span.trace_id, span.name) for span in read_spans(json.loads(exported.output))]
    assert found == [("gateway", ID, "span 1"), ("gateway", ID, "span 3"), ("verifier", ID, "span 5")]


@pytest.mark.parametrize("what", [["print", ID], ["xyz"], [ID.upper()], [ID, "--rounds", "5-"]])
def test_wrong_arguments_of_the_command_are_usage_errors(what: list[str]) -> None:
    assert CliRunner().invoke(app, ["trace", *what]).exit_code == 2


def test_a_trace_that_is_nowhere_is_not_found(folder: Path) -> None:
    with pytest.raises(NotFound, match="no trace"):
        trace_from_folder(folder, "f" * 32)
    assert CliRunner().invoke(app, ["trace", "f" * 32, "--traces", str(folder)]).exit_code == 1


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", asked
        server.shutdown()


def test_jaeger_is_asked_for_the_trace() -> None:
    with answering(200, json.dumps({"result": OTLP}).encode()) as (url, asked):
        assert trace_from_jaeger(url, ID) == OTLP
    assert asked == [f"/api/v3/traces/{ID}"]


def test_numbers_of_enumerators_are_read_as_their_names(folder: Path) -> None:
    numbers = json.dumps(OTLP).replace('"SPAN_KIND_SERVER"', "2").replace('"STATUS_CODE_ERROR"', "2")
    assert list(read_spans(json.loads(numbers))) == list(read_spans(OTLP))


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b"", NotFound),
        (500, b"", Unavailable),
        (200, b"<html>", Unavailable),
        (200, b'{"data":[]}', Unavailable),
        (200, b'{"result":[]}', Unavailable),
    ],
)
def test_an_invalid_answer_of_jaeger_is_a_typed_error(status: int, body: bytes, error: type[Exception]) -> None:
    with answering(status, body) as (url, _), pytest.raises(error):
        trace_from_jaeger(url, ID)


def test_an_address_without_jaeger_is_a_typed_error() -> None:
    with pytest.raises(Unavailable):
        trace_from_jaeger("http://127.0.0.1:1", ID)
    with pytest.raises(InvalidArgument):
        trace_from_jaeger("file:///etc/passwd", ID)
