"""Which requests are worth a span whatever was sampled: those that `deploy/otel/collector.yaml` keeps for what they
are, so that neither head nor tail loses them."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.telemetry import spans
from slipstream.telemetry.tracing import Value

SLOW_S = 10.0
ROLLED_BACK = 48
"""Candidates, if they were also so much of what was drafted:"""
ROLLED_BACK_PERCENT = 75


def remarkable(attributes: Mapping[str, Value], seconds: float, failed: bool) -> bool:
    """Whether a request failed, was slow, was moved to another verifier, or had most of many candidates rolled back.
    `attributes`: of its span."""

    def least(key: str, limit: int) -> bool:
        value = attributes.get(key)
        return isinstance(value, int) and value >= limit

    rolled_back = least(spans.ROLLED_BACK, ROLLED_BACK) and least(spans.ROLLED_BACK_PERCENT, ROLLED_BACK_PERCENT)
    return failed or seconds >= SLOW_S or rolled_back or least(spans.REHOMED, 1)
