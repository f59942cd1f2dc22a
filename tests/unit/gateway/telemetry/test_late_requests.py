"""Which requests are late: by the gateway's objectives, and by a fixed time where it has none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from gateway.request_context import RequestContext
from gateway.telemetry.gateway_spans import traced
from gateway.telemetry.request_metrics import Objectives
from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Clocks, Tracing
from slipstream.v1 import gateway_pb2

BOUND = Objectives(ttft_s=1.0, tpot_s=0.1)
UNSAMPLED = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-00")


class Kept(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Requests:
    """Requests of a gateway whose clock moves only while they take time."""

    def __init__(self, objectives: Objectives) -> None:
        self._now_s, self._kept, self._objectives = 0.0, Kept(), objectives
        self._tracing = Tracing("slipstream-gateway", [self._kept], Clocks(monotonic_s=lambda: self._now_s))

    def send(self, *, ttft_s: float = 0.0, tpot_s: float = 0.0, tokens: int = 1, sampled: bool = True) -> None:
        context = RequestContext(headers=() if sampled else (UNSAMPLED,))
        with traced(self._tracing, spans.GENERATE, context, self._objectives) as request:
            self._now_s += ttft_s
            if not tokens:
                return
            request.event_sent(gateway_pb2.Delta(text="a"))
            self._now_s += tpot_s * (tokens - 1)
            statistics = gateway_pb2.Statistics(ttft_s=ttft_s, e2e_s=ttft_s + tpot_s * (tokens - 1), emitted=tokens)
            request.event_sent(gateway_pb2.Finished(statistics=statistics))

    @property
    def late(self) -> Sequence[bool]:
        """Whether each request that has a span is late."""
        return [bool((span.attributes or {}).get(spans.LATE)) for span in self._kept.spans]


@pytest.fixture(autouse=True)
def the_client_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")


def test_a_long_text_is_not_late_where_there_are_objectives() -> None:
    requests = Requests(BOUND)
    requests.send(ttft_s=0.9, tpot_s=0.09, tokens=1000)
    requests.send(ttft_s=1.1, tokens=1)
    requests.send(ttft_s=0.1, tpot_s=0.11, tokens=3)
    assert requests.late == [False, True, True]


def test_a_request_that_sent_nothing_waited_for_its_first_token() -> None:
    requests = Requests(BOUND)
    requests.send(ttft_s=1.1, tokens=0)
    requests.send(ttft_s=0.9, tokens=0)
    assert requests.late == [True, False]


def test_without_objectives_ten_seconds_are_late() -> None:
    requests = Requests(Objectives())
    requests.send(ttft_s=9.9)
    requests.send(ttft_s=9.0, tpot_s=0.1, tokens=12)
    assert requests.late == [False, True]


def test_a_late_request_has_a_span_though_it_is_not_sampled() -> None:
    requests = Requests(BOUND)
    requests.send(ttft_s=60.0, sampled=False)
    requests.send(ttft_s=0.5, tpot_s=0.05, tokens=1000, sampled=False)
    assert requests.late == [True]
