"""Names of spans, clocks that disagree, and who is sampled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks, Span, Trace, Tracing
from slipstream.v1 import types_pb2

numbers = st.integers(0, 2**32 - 1)


class Kept(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Hands:
    """Of a clock that is set by hand."""

    def __init__(self, wall_s: float, monotonic_s: float) -> None:
        self.wall_s = wall_s
        self.monotonic_s = monotonic_s

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: int(self.wall_s * 1e9), lambda: self.monotonic_s)

    def pass_(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


def begun(tracing: Tracing, carrier: dict[str, str] | None = None) -> Trace:
    trace = tracing.begin(spans.GENERATE, carrier or {})
    assert trace is not None
    return trace


@settings(deadline=None)  # the first one looks at the machine for its resource
@given(st.tuples(numbers, numbers), st.tuples(numbers, numbers), numbers)
def test_every_process_calls_a_round_and_a_draft_the_same(
    one: tuple[int, int], other: tuple[int, int], number: int
) -> None:
    trace = begun(Tracing("a", []))
    peer = Tracing("b", []).join(trace.context())
    assert peer is not None
    assert peer.round(*one) == trace.round(*one)
    assert peer.draft(one[0], number, one[1]) == trace.draft(one[0], number, one[1])
    names = {trace.root.span_id, trace.round(*one).span_id, trace.draft(one[0], number, one[1]).span_id}
    assert len(names) == 3 and 0 not in names
    assert (trace.round(*one) == trace.round(*other)) == (one == other)
    assert begun(Tracing("a", []), {}).round(*one) != trace.round(*one)


@pytest.mark.parametrize(
    ("behind_s", "shift_s"),
    [
        (0.0, 0.0),
        (0.3, 0.0),
        (-0.001, 0.001),
        (-3600.0, 3600.0),
        (3600.0, -3600.0),
        (1.5, -1.5),
        (1e6, 0.0),
        (-1e9, 0.0),
    ],
)
def test_the_clock_of_a_sender_is_corrected_only_where_it_cannot_be_right(behind_s: float, shift_s: float) -> None:
    """`behind_s`: what the receiver's clock shows when the message comes, less what the sender's showed."""
    sender, receiver = Hands(1000.0, 5.0), Hands(1000.0 + behind_s, 77.0)
    context = begun(Tracing("a", [], sender.clocks)).context()
    trace = Tracing("b", [], receiver.clocks).join(context)
    assert trace is not None
    receiver.pass_(2.0)
    receiver.wall_s += 500.0  # set meanwhile: nothing moves
    assert trace.at(trace.now()) / 1e9 == pytest.approx(1000.0 + behind_s + shift_s + 2.0)
    assert trace.moment(trace.at(78.25)) == pytest.approx(78.25)


@pytest.mark.parametrize(
    "context",
    [
        types_pb2.TraceContext(),
        types_pb2.TraceContext(trace_id=bytes(16), span_id=1),
        types_pb2.TraceContext(trace_id=b"1" * 15, span_id=1),
        types_pb2.TraceContext(trace_id=b"1" * 17, span_id=1),
        types_pb2.TraceContext(trace_id=b"1" * 16),
    ],
)
def test_a_malformed_context_is_none(context: types_pb2.TraceContext) -> None:
    assert Tracing("a", []).join(context) is None


@pytest.mark.parametrize("sent", [0, 1, 2**64 - 1])
def test_a_time_that_no_clock_shows_changes_no_span(sent: int) -> None:
    hands = Hands(1e9, 5.0)
    trace = Tracing("a", [], hands.clocks).join(
        types_pb2.TraceContext(trace_id=b"1" * 16, span_id=1, sent_unix_nano=sent)
    )
    assert trace is not None and trace.at(trace.now()) == pytest.approx(1e18)


@pytest.mark.parametrize(
    ("sampler", "argument", "flags", "sampled"),
    [
        ("parentbased_traceidratio", "0", "", False),
        ("parentbased_traceidratio", "0", "01", True),
        ("parentbased_traceidratio", "1", "", True),
        ("parentbased_traceidratio", "1", "00", False),
        ("always_off", "", "01", False),
        ("", "", "", True),
    ],
)
def test_the_standard_variables_decide_what_is_sampled(
    sampler: str, argument: str, flags: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)):
        if value:
            monkeypatch.setenv(name, value)
    carrier = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-{flags}"} if flags else {}
    trace = Tracing("a", []).begin(spans.GENERATE, carrier)
    assert (trace is not None and trace.sampled) == sampled
    assert (trace is None) == (sampler == "always_off")
    if trace is not None and flags:
        assert trace.id == "ab" * 16
        assert trace.parent is not None


@pytest.mark.parametrize(
    ("sampler", "flags", "asked"),
    [
        ("parentbased_always_on", "01", True),
        ("parentbased_always_on", "", False),
        ("parentbased_traceidratio", "01", True),
        ("traceidratio", "01", False),
    ],
)
def test_the_sampled_flag_of_a_client_asks_for_a_trace_under_parent_based_samplers(
    sampler: str, flags: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    assert begun(Tracing("a", []), {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"} if flags else {}).asked == asked


def test_the_trace_id_of_a_client_does_not_decide_its_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio is one of trace ids, the lowest first."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1e-9")
    assert not begun(Tracing("a", []), {"traceparent": f"00-{'ab' * 8}{'00' * 8}-{'cd' * 8}-01"}).sampled


@pytest.mark.parametrize(("state", "missing"), [("slipstream=unsent", False), ("", True), ("other=unsent", True)])
def test_a_trace_whose_client_sends_no_spans_misses_no_parent(state: str, missing: bool) -> None:
    trace = begun(Tracing("a", []), {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": state})
    assert (trace.id, trace.asked, trace.parent is not None) == ("ab" * 16, True, missing)


@pytest.mark.parametrize("value", ["", "00-zz-1-01", f"00-{'00' * 16}-{'cd' * 8}-01", "x" * 10_000])
def test_a_bad_traceparent_begins_a_trace_of_its_own(value: str) -> None:
    assert begun(Tracing("a", []), {"traceparent": value}).parent is None


def test_a_span_never_ends_before_it_begins_and_leaves_out_what_is_not_there() -> None:
    kept = Kept()
    trace = begun(Tracing("a", [kept]))
    trace.emit(Span(spans.COMMIT, 5.0, 4.0, {spans.TOKENS: 3, spans.WAIT: 0.1 + 0.2, spans.ERROR: None}))
    [span] = kept.spans
    assert span.start_time == span.end_time
    assert dict(span.attributes or {}) == {spans.TOKENS: 3, spans.WAIT: 0.3}, "sums of floats to the microsecond"
    assert span.parent == trace.root
