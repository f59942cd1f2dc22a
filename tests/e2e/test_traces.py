"""A trace of the three real processes, from the command that asks for it to the command that prints it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.errors import NotFound
from slipstream.telemetry import spans
from slipstream.telemetry.trace_reader import ReadSpan, read_spans, trace_from_folder
from tests.e2e.conftest import MOST_TRIES

NOTE = "x" * 300
SPAN = {
    "traceId": "ab" * 16,
    "spanId": "cd" * 8,
    "name": "generate",
    "kind": "SPAN_KIND_SERVER",
    "startTimeUnixNano": "1000",
    "endTimeUnixNano": "5000",
    "attributes": [{"key": "error.type", "value": {"stringValue": NOTE}}],
}
SENT_S = 10.0
"""Seconds in which processes have written their spans, however busy the machine is; with MOST_TRIES a bound."""
EVERY = set(spans.SPANS) - {spans.RESUME, spans.STEP, spans.DRAFT}
"""A drafter may have done nothing in the rounds that stand out of so short a text."""


def generate(server: str, *options: str) -> tuple[str | None, str]:
    """The id of the trace, and the line about it."""
    done = CliRunner().invoke(app, ["generate", "def f(", "--server", server, "--max-tokens", "12", "--json", *options])
    assert done.exit_code == 0, done.output
    trace_id: str | None = json.loads(done.stdout)["trace_id"]
    return trace_id, done.stderr


def written(folder: Path, trace_id: str) -> list[ReadSpan]:
    """Once every process has sent all of its own; what there is after SENT_S, if spans are missing."""
    until = time.monotonic() + SENT_S
    trace: list[ReadSpan] = []
    while not {span.name for span in trace} >= EVERY and time.monotonic() < until:
        with contextlib.suppress(NotFound):
            trace = list(read_spans(trace_from_folder(folder, trace_id)))
        time.sleep(0.1)
    return trace


def traced(server: str, folder: Path) -> tuple[str, list[ReadSpan]]:
    """A trace with every span: of a drafter too, whose first candidates may come after so short a text is over."""
    for _ in range(MOST_TRIES):
        trace_id, message = generate(server, "--trace")
        assert trace_id is not None
        assert message == f"slipstream trace {trace_id}\n"
        trace = written(folder, trace_id)
        if {span.name for span in trace} >= EVERY:
            return trace_id, trace
    raise AssertionError(f"no trace is whole: the last one is {trace}")


def test_a_request_is_traced_if_its_client_asks_for_it(server: str, traces: Path) -> None:
    assert generate(server) == (None, "")
    trace_id, trace = traced(server, traces)
    assert {span.service for span in trace} == set(spans.SERVICES)
    assert "def f(" not in "".join(path.read_text() for path in traces.iterdir())
    assert sum(span.attributes[spans.TOKENS] for span in trace if span.name == spans.ROUNDS_SUM) == 12
    [root] = [span for span in trace if span.name == spans.GENERATE]
    assert not root.parent_id  # the command sends no span that could be missing
    printed = CliRunner().invoke(app, ["trace", trace_id], env={"SLIPSTREAM_TRACES": str(traces)})
    assert all(
        name in printed.output
        for name in ("text_completion", "prefill", "rounds 0-", "draft rounds", "verify", "commit")
    )


def test_a_request_that_is_refused_is_traced_too(server: str) -> None:
    done = CliRunner().invoke(app, ["generate", "x", "--server", server, "--drafter", "nobody", "--trace"])
    assert done.exit_code == 1
    assert "NO_DRAFTER" in done.stderr and "slipstream trace " in done.stderr


def test_a_trace_that_is_on_its_way_is_waited_for(tmp_path: Path) -> None:
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}) + "\n"
    late = threading.Timer(1.0, lambda: (tmp_path / "late.jsonl").write_text(line))
    late.start()
    command = ["trace", SPAN["traceId"], "--traces", str(tmp_path), "--wait-s"]
    assert CliRunner().invoke(app, [*command, "0"]).exit_code == 1
    printed = CliRunner().invoke(app, [*command, "30", "--wide"])
    assert printed.exit_code == 0 and NOTE in printed.output
